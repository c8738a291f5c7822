"""What a causal model generates before and after: does it find what it read far back, and how does it go on writing?

    prompt    m tokens in a random order, and then CUE of them again, in the order of a place in their first half
    recall    the share of the ASKED tokens after that place that the model generates, greedily

The tokens are those of the samples, shuffled, so knowing the language does not help. A perplexity that hardly grows can
hide a large loss here (arXiv 2603.26556).
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet, count
from softless.probes.running import Estimate, observe

PROMPTS, CUE, ASKED = 32, 8, 4
TEXTS, READ, WRITTEN = 3, 64, 32  # samples that are continued; tokens read and written
BATCH = 8
NAMES = "input_ids"


class Generated(NamedTuple):
    """What a model generated.

    recall    the share of right tokens of each prompt
    texts     tokens that continue the first samples
    """

    recall: list[float]
    texts: list[list[int]]


def generate(layers: Layers, samples: SampleSet, seed: int, advance: Callable[[str, float], None]) -> Generated:
    """Let the model as it is now answer all prompts, and continue the first samples."""
    questions, answers = prompts(samples, layers.longest, seed)
    generated = []
    for part in questions.split(BATCH):
        generated.append(layers.generated(part.to(layers.device), ASKED).cpu())
        advance("asking it to recall", len(part) / len(questions))
    right = (torch.cat(generated) == answers).double().mean(1)
    texts = layers.generated(beginnings(samples).to(layers.device), WRITTEN)
    return Generated(right.tolist(), texts.tolist())


def prompts(samples: SampleSet, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return prompts [PROMPTS, m + CUE] and their answers [PROMPTS, ASKED]; m is as long as a sample, if that fits."""
    tokens = samples[NAMES].cpu()
    length = min(tokens.shape[1], longest - CUE - ASKED)
    draw = torch.Generator().manual_seed(seed)
    bag, rows = tokens.flatten(), []
    for _ in range(PROMPTS):
        row = bag[torch.randint(len(bag), (length,), generator=draw)]
        start = int(torch.randint(max(1, length // 2), (1,), generator=draw))
        start = min(start, max(0, length - CUE - ASKED))
        rows.append(torch.cat([row, row[start : start + CUE + ASKED]]))
    whole = torch.stack(rows)
    return whole[:, :-ASKED], whole[:, -ASKED:]


def beginnings(samples: SampleSet) -> Tensor:
    """Return the beginnings of samples to continue, [TEXTS, tokens]."""
    return samples[NAMES][:TEXTS, : min(READ, max(1, samples[NAMES].shape[1] // 2))]


def askable(layers: Layers, samples: SampleSet) -> bool:
    """Return whether the model generates, and samples are long enough to hide something in their first half."""
    return layers.generates and samples[NAMES].shape[1] >= 2 * (CUE + ASKED) and count(samples) > 0


def compared(samples: SampleSet, before: Generated, after: Generated) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the recall of both models with intervals, and the texts side by side, as tokens."""
    pair = torch.tensor([before.recall, after.recall], dtype=torch.float64)
    names = ("before", "after", "lost")
    estimates: list[Estimate] = [observe(x[:, None]).estimates()[0] for x in (*pair, pair[0] - pair[1])]
    recall = {name: asdict(estimate) for name, estimate in zip(names, estimates, strict=True)}
    texts = zip(beginnings(samples).tolist(), before.texts, after.texts, strict=True)
    sides = [{"prompt": prompt, "original": original, "converted": converted} for prompt, original, converted in texts]
    return recall | {"prompts": PROMPTS, "cue": CUE, "asked": ASKED}, sides
