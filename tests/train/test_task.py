"""The trainer knows no task: a new one trains, evaluates, is interrupted, and resumes to the same bits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softless.data.sampler import ResumableSampler
from softless.errors import NonFiniteError
from softless.io import checkpoint
from softless.train.devices import Devices
from softless.train.loop import Interrupted, Job, fit
from softless.train.recipe import Recipe
from softless.train.run import Run
from softless.train.tasks import Evaluation
from tests.train.jobs import Quiet, digest
from tests.train.test_resume import Impatient

VOCABULARY, LENGTH = 7, 6
RECIPE = Recipe(
    batch=8, epochs=3, warmup_epochs=1, lr=2e-2, warmup_lr=1e-3, min_lr=1e-3, clip=1.0, ema=0.5, accumulate=2,
    checkpoint_every=4, log_every=2,
)  # fmt: skip


class Pieces(NamedTuple):
    """Tokens [B, LENGTH], and which sequences they are."""

    tokens: Tensor
    ids: Tensor


class Sequences:
    """A loader of sequences in which each token is the one before it plus a step, modulo the vocabulary."""

    def __init__(self, count: int, batch: int, *, train: bool):
        start, step = torch.arange(count)[:, None], 1 + torch.arange(count)[:, None] % 2
        self.tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
        self.sampler = ResumableSampler(count, seed=0, shuffle=train)
        self.batch, self.train, self.skipped = batch, train, {}
        self.per_epoch = count // batch if train else -(-count // batch)

    def __iter__(self) -> Iterator[Pieces]:
        order = torch.tensor(list(self.sampler))
        for ids in order.split(self.batch):
            self.sampler.advance(len(ids))
            yield Pieces(self.tokens[ids], ids)

    def blank(self) -> Pieces:
        return Pieces(self.tokens[:1], torch.zeros(1, dtype=torch.int64))


class NextTokenLoss:
    def parts(self, batch: Pieces, count: int) -> list[tuple[Tensor, ...]]:
        return [(tokens,) for tokens in batch.tokens.chunk(count)]

    def __call__(self, model: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(part[0][:, :-1]).flatten(0, 1), part[0][:, 1:].flatten())


class Perplexity:
    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens

    def add(self, model: nn.Module, batch: Pieces) -> None:
        logits, targets = model(batch.tokens[:, :-1]).flatten(0, 1), batch.tokens[:, 1:].flatten()
        self.sums += torch.stack([F.cross_entropy(logits, targets, reduction="sum"), torch.tensor(len(targets))])

    def tensors(self) -> list[Tensor]:
        return [self.sums]

    def evaluation(self) -> Evaluation:
        loss = (self.sums[0] / self.sums[1]).item()
        numbers = {"perplexity": torch.tensor(loss).exp().item()}
        return Evaluation(loss, numbers, {"tokens": int(self.sums[1]), **numbers})


class NextToken:
    """A small language task, of which the trainer knows nothing."""

    unit, metric, higher_is_better = "sequences", "perplexity", False
    speed_unit = "tokens", LENGTH

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.1), nn.Linear(8, VOCABULARY))
        self.train, self.test = Sequences(26, RECIPE.batch, train=True), Sequences(9, 4, train=False)
        self.loss, self.metrics = NextTokenLoss(), Perplexity

    def names(self, ids: list[int]) -> list[str]:
        return [f"sequence {index}" for index in ids]


def job(folder: Path, *, task: NextToken | None = None, resume: bool = False, watch: Quiet | None = None) -> Job:
    watch = Quiet() if watch is None else watch
    task = NextToken() if task is None else task
    about = {"task": "next token"}
    return Job(task=task, recipe=RECIPE, folder=folder, devices=Devices("cpu"), watch=watch, about=about, resume=resume)


def test_a_second_task_trains_and_its_own_metric_decides_which_weights_are_best(tmp_path):
    watch = Quiet()
    outcome = fit(job(tmp_path, watch=watch))
    lines = [numbers for _, numbers in watch.lines]
    measured = [numbers["perplexity"] for numbers in lines if "perplexity" in numbers]
    assert (outcome.steps, outcome.metric, outcome.best) == (9, "perplexity", min(measured))
    assert outcome.best < VOCABULARY
    assert all("tokens_per_second" in numbers for numbers in lines if "loss" in numbers)
    assert json.loads((tmp_path / "result.json").read_text())["best_perplexity"] == outcome.best
    best = checkpoint.newest(Run(tmp_path).best)
    assert best.state == {"about": {"task": "next token"}, "scores": {"tokens": 45, "perplexity": outcome.best}}


@pytest.mark.parametrize("update", [1, 3, 4, 8])
def test_a_second_task_that_is_interrupted_resumes_to_the_same_bits(tmp_path, update):
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
    fit(job(tmp_path / "straight"))
    with pytest.raises(Interrupted):
        fit(job(tmp_path / "resumed", watch=Impatient(update)))
    fit(job(tmp_path / "resumed", resume=True))
    assert digest(tmp_path / "resumed", generators=False) == digest(tmp_path / "straight", generators=False)


def test_the_report_of_an_update_that_is_not_finite_names_the_examples_of_the_task(tmp_path):
    task = NextToken()
    with torch.no_grad():
        task.model[0].weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"the sequences are listed in .*nonfinite-rank0\.json"):
        fit(job(tmp_path, task=task))
    report = json.loads((tmp_path / "nonfinite-rank0.json").read_text())
    assert report["names"] == [f"sequence {index}" for index in report["ids"]]
