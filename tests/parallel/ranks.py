"""Several ranks: `python -m tests.parallel.ranks FOLDER RANKS FIRST COUNT` writes a FOLDER/RANK.json for each.

Every rank makes the same whole sequence, takes its own tokens, and compares what it gets with what the whole gives
alone, in float64.
"""

import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import softless
from softless.errors import SoftlessError
from softless.mechanisms.kernelized import Kernelized
from tests.laws import cases
from tests.laws.cases import Ask, Case, ask
from tests.ranks import fork

# A sum of terms of both signs may be divided by: the error is then of the question, not of the answer.
CANCELS = ("identity", "leaky_relu")
MERGED = [case for case in cases.CASES if isinstance(case.made, Kernelized) and not case.made.places]
MERGED = [case for case in MERGED if not case.made.mixes_queries]
CASES = [
    case
    for case in MERGED
    if not (case.name in ("linear", "blend") and case.options.get("phi") in CANCELS and "normalize" not in case.options)
]


def cut(draw: random.Random, tokens: int, ranks: int) -> list[int]:
    """Where each rank's tokens begin and end; some may have none."""
    return [0, *sorted(draw.randint(0, tokens) for _ in range(ranks - 1)), tokens]


def question(draw: random.Random, case: Case, seed: int, *, is_causal: bool) -> Ask:
    tokens = draw.choice((1, 2, 7, 40, 64, 65, 130))
    alike = is_causal or (case.name == "angular" and not case.options.get("exact"))
    heads = draw.choice([(1, 1), (2, 2), (4, 2)])
    at = ask(case, tokens, tokens if alike else draw.choice((1, 5, 70)), heads=heads, dims=(4, 5), seed=seed)
    at = at._replace(v=at.v + draw.choice((0.0, 1.0)))
    if draw.random() < 0.5:
        return at
    mask = torch.rand(2, at.k.shape[2], generator=torch.Generator().manual_seed(seed)) < draw.choice((0.2, 0.7))
    k, v = (torch.where(mask[:, None, :, None], x, torch.nan) for x in (at.k, at.v))
    return at._replace(k=k, v=v, key_mask=mask)


def with_gradients(at: Ask, run, upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of q, k, v and the inputs."""
    leaves = [x.clone().requires_grad_() for x in (*at[:3], *at.inputs.values())]
    inputs = dict(zip(at.inputs, leaves[3:], strict=True))
    out = run(*leaves[:3], inputs)
    (out * upstream).sum().backward()
    return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def apart(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    """Relative to the largest of the whole."""
    if not found.isfinite().all():
        return float("inf")
    return float((found - expected).abs().max() / (1 + whole.abs().max())) if found.numel() else 0.0


def equal(seed: int, rank: int, ranks: int) -> dict[str, object]:
    """How far this rank's output and gradients are from the whole's."""
    draw = random.Random(seed)
    case = CASES[seed % len(CASES)]
    is_causal = draw.random() < 0.5 and True in case.forms
    at = question(draw, case, seed, is_causal=is_causal)
    queries = cut(draw, at.q.shape[2], ranks)
    keys = queries if at.k.shape[2] == at.q.shape[2] else cut(draw, at.k.shape[2], ranks)
    mine, theirs = slice(*queries[rank : rank + 2]), slice(*keys[rank : rank + 2])
    options = {"is_causal": is_causal}
    upstream = torch.randn(
        *at.q.shape[:3], at.v.shape[3], generator=torch.Generator().manual_seed(seed), dtype=at.q.dtype
    )

    def alone(q: Tensor, k: Tensor, v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return softless.attention(q, k, v, case.made, key_mask=at.key_mask, inputs=inputs, backend="torch", **options)

    part = at._replace(
        q=at.q[:, :, mine], k=at.k[:, :, theirs], v=at.v[:, :, theirs],
        key_mask=None if at.key_mask is None else at.key_mask[:, theirs],
    )  # fmt: skip

    def together(q: Tensor, k: Tensor, v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return softless.parallel.attention(q, k, v, case.made, key_mask=part.key_mask, inputs=inputs, **options)

    out, grads = with_gradients(at, alone, upstream)
    found, found_grads = with_gradients(part, together, upstream[:, :, mine])
    for grad in found_grads[3:]:  # of an input that every rank has, each rank has a share
        dist.all_reduce(grad)
    places = [mine, theirs, theirs]
    errors = [apart(found, out[:, :, mine], out)]
    errors += [apart(a, b[:, :, place], b) for a, b, place in zip(found_grads, grads, places, strict=False)]
    errors += [apart(a, b, b) for a, b in zip(found_grads[3:], grads[3:], strict=True)]
    return {"case": str(case), "seed": seed, "causal": is_causal, "cuts": [queries, keys], "error": max(errors)}


def frozen(rank: int) -> list[bool]:
    """Whether the output can be differentiated where only queries need gradients and rank 0 has none: causal or not."""
    x = torch.randn(1, 2, 3 * rank, 4)
    q = x.clone().requires_grad_()
    return [softless.parallel.attention(q, x, x, is_causal=causal).requires_grad for causal in (True, False)]


NEAR = softless.mechanism("nearfar", maps="identity")


def refusals(rank: int) -> dict[str, str]:
    """What a call that cannot be says."""
    x = torch.randn(1, 2, 3, 4)
    other = [dist.new_group([each]) for each in range(2)][1 - rank]  # of the other rank alone
    calls = {
        "scored": lambda: softless.parallel.attention(x, x, x, "softmax"),
        "uneven": lambda: softless.parallel.attention(x[:, :, :2], x, x, "inline", is_causal=True),
        "mean of queries": lambda: softless.parallel.attention(
            x, x, x, softless.mechanism("regress", weighting="query")
        ),
        "places": lambda: softless.parallel.attention(x, x, x, NEAR, inputs={"gain": torch.zeros(2)}),
        "apart": lambda: softless.parallel.attention(x[:, :, :0], x, x, "angular"),
        "stranger": lambda: softless.parallel.attention(x, x, x, "inline", group=other),
        "shape": lambda: softless.parallel.attention(x[0], x, x, "inline"),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except SoftlessError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    folder, (ranks, first, count) = Path(sys.argv[1]), map(int, sys.argv[2:])
    rank = fork(folder, ranks)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100))
    said, graphs = (refusals(rank), frozen(rank)) if ranks == 2 else ({}, [])
    found = [equal(seed, rank, ranks) for seed in range(first, first + count)]
    (folder / f"{rank}.json").write_text(json.dumps({"said": said, "graphs": graphs, "cases": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
