"""One update, against what it should be: schedule, decay, clipping, accumulation, averages, mixing, a teacher."""

import gc
import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.random import fork_rng

import softless
from softless.errors import ArgumentError
from softless.train.devices import Devices
from softless.train.engine import Engine, Replay
from softless.train.recipe import Recipe
from softless.train.tasks.classify import ClassificationLoss
from tests.train.jobs import RECIPE, network

PLAIN = {"mixup": 0.0, "cutmix": 0.0, "ema": 0.0}


def engine(model, *, teacher=None, per_epoch=5, devices=None, **changes):
    recipe = Recipe(**{**{name: getattr(RECIPE, name) for name in ("batch", "image_size", "augment")}, **changes})
    devices = Devices("cpu", recipe.precision) if devices is None else devices
    return Engine(model, recipe, devices, ClassificationLoss(recipe, 3, teacher), per_epoch)


def mixed(recipe, model, images, labels):
    loss = ClassificationLoss(recipe, 3)
    (part,) = loss.parts((images, labels), 1)
    return loss(model, part)


def batch(count=24):
    return torch.randn(count, 3, 4, 4), torch.arange(count) % 3


def test_the_learning_rate_of_every_update_matches_the_formula():
    """Linear warm-up, then a cosine that counts the warm-up too, then the least rate while it cools down."""
    made = engine(
        network(0.0), epochs=6, cooldown_epochs=2, warmup_epochs=2, lr=1.0, warmup_lr=0.1, min_lr=0.05, per_epoch=5
    )
    rates = []
    for _ in range(40):
        made.update(batch(2))
        rates.append(made.lr)
    expected = [0.1 + 0.9 * n / 10 for n in range(10)]
    expected += [0.05 + 0.95 * (1 + math.cos(math.pi * n / 30)) / 2 for n in range(10, 30)]
    expected += [0.05] * 10
    assert np.abs(np.array(rates) - expected).max() <= 1e-15
    assert rates[0] == 0.1
    assert rates[10] < rates[9] + 0.09


def test_weight_decay_leaves_out_biases_norms_and_position_tables():
    model = softless.create_model("inline_deit_tiny", img_size=8, patch_size=4, dims=12, depths=1, heads=2)
    made = engine(model, weight_decay=0.05)
    decay = {id(p): group["weight_decay"] for group in made.optimizer.param_groups for p in group["params"]}
    names = {name: decay[id(p)] for name, p in model.named_parameters()}
    free = {name for name, value in names.items() if value == 0}
    assert free == {n for n, p in model.named_parameters() if p.ndim == 1 or n in ("cls_token", "pos_embed")}
    assert names["blocks.0.attn.residual.2.weight"] == 0.05


def test_a_cuda_graph_is_refused_on_a_cpu():
    with pytest.raises(ArgumentError, match="a CUDA graph needs one CUDA device, and this training has a CPU"):
        Devices("cpu", graph=True)


class Rerun(Replay):
    """CUDA's graphs in the words of a CPU: what was recorded is run again, and answers where it did."""

    def replay(self):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates(self.rates)
        for answer, new in zip(self.answers, self.learn(self.inputs), strict=True):
            answer.copy_(new)
        self._set_rates(rates)


@pytest.fixture
def replaying(monkeypatch):
    """Engines that replay what was recorded, without CUDA."""
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr("softless.train.engine.Replay", Rerun)
    monkeypatch.setattr(Rerun, "graph", property(lambda self: self, lambda _self, _graph: None), raising=False)
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _which: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_devices: fork_rng(devices=[]))

    def made(*, graph=True, **changes):
        devices = Devices("cpu")
        devices.graph = graph
        return engine(network(0.0), devices=devices, **changes)

    return made


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replayed_update_equals_a_plain_one_and_recording_changes_nothing(replaying, accumulate):
    """The kernels are CUDA's (tests/gpu/test_train.py); what lies where, and what is undone, is told here."""
    made = []
    for graph in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        learner = replaying(graph=graph, accumulate=accumulate, mixup=0.8, clip=1.0, ema=0.9)
        for seed in range(4):
            torch.manual_seed(seed)
            learner.update(batch())
        made.append(learner)
    plain, replayed = made
    for a, b in zip(plain.plain.parameters(), replayed.plain.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain.best_model.parameters(), replayed.best_model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.stack(plain.losses), torch.stack(replayed.losses))
    assert plain.failure() is replayed.failure() is None
    assert plain.lr == replayed.lr
    replayed.update((torch.full((24, 3, 4, 4), torch.nan), batch()[1]))
    assert replayed.failure().step == 4


def test_an_earlier_engine_is_freed_before_an_update_is_recorded(replaying, monkeypatch):
    """To free its graph in the midst of a recording would end that. An engine and its replay know each other, so they
    are freed when garbage is collected, which may be at any time."""
    gc.disable()
    try:
        earlier = replaying()
        earlier.update(batch())
        earlier = weakref.ref(earlier)
        assert earlier() is not None
        found = []
        monkeypatch.setattr(torch.cuda, "graph", lambda _which: nullcontext(found.append(earlier())))
        replaying().update(batch())
        assert found == [None]
    finally:
        gc.enable()


def test_an_accumulated_update_equals_the_update_of_the_complete_batch():
    whole, parts = (network(0.0, torch.float64) for _ in range(2))
    images, labels = batch()
    one, four = engine(whole, warmup_epochs=0), engine(parts, warmup_epochs=0, accumulate=4)
    for _ in range(5):
        for each in (one, four):
            each.update((images.double(), labels))
    assert (one.losses[-1] - four.losses[-1]).abs() <= 1e-6
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12


def test_an_update_is_that_of_adamw_with_a_clipped_gradient():
    ours, plain = network(0.0), network(0.0)
    made = engine(ours, warmup_epochs=0, lr=1e-2, weight_decay=0.0, clip=0.01)
    images, labels = batch()
    made.update((images, labels))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    F.cross_entropy(plain(images), labels).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    optimizer.step()
    assert norm > 0.01
    assert torch.isclose(made.norms[0], norm)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_averaged_weights_are_the_moving_average():
    model = network(0.0)
    expected = [p.detach().clone() for p in model.parameters()]
    made = engine(model, ema=0.9, warmup_epochs=0)
    for _ in range(3):
        made.update(batch())
        expected = [0.9 * old + 0.1 * p.detach() for old, p in zip(expected, model.parameters(), strict=True)]
    for a, b in zip(made.best_model.parameters(), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert made.best_model is not model
    assert engine(model).best_model is model


def test_an_average_that_warms_up_follows_the_weights_at_first():
    model = network(0.0)
    made = engine(model, ema=0.999, ema_warmup=True, warmup_epochs=0)
    made.update(batch())
    for a, b in zip(made.best_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_mixed_batch_is_mixed_with_itself_reversed():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x.flatten(1)[:, :3]

    images, labels = torch.arange(4.0)[:, None, None, None].expand(4, 3, 4, 4), torch.tensor([0, 1, 2, 0])
    before = images.clone()
    np.random.seed(0)  # noqa: NPY002
    loss = mixed(Recipe(mixup=0.8, label_smoothing=0.1), Look(), images, labels)
    share = ((seen[0][0] - 3) / (0 - 3)).mean().item()
    assert 0 < share < 1
    torch.testing.assert_close(seen[0], share * images + (1 - share) * images.flip(0))
    assert torch.equal(images, before)
    smooth = F.one_hot(labels, 3) * 0.9 + 0.1 / 3
    target = share * smooth + (1 - share) * smooth.flip(0)
    torch.testing.assert_close(loss, F.cross_entropy(seen[0].flatten(1)[:, :3], target))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_teacher_is_weighed_against_the_labels(temperature):
    torch.manual_seed(1)
    student, teacher = network(0.0), nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    images, labels = batch()
    made = ClassificationLoss(Recipe(distill=0.3, temperature=temperature), 3, teacher)
    logits, wanted = student(images), teacher(images).detach()
    p, q = (wanted / temperature).softmax(1), (logits / temperature).softmax(1)
    kl = (p * (p.log() - q.log())).sum(1).mean() * temperature**2
    torch.testing.assert_close(made(student, (images, labels)), 0.7 * F.cross_entropy(logits, labels) + 0.3 * kl)
    assert not any(p.requires_grad for p in teacher.parameters())
    alone = ClassificationLoss(Recipe(distill=0.3), 3)(student, (images, labels))
    torch.testing.assert_close(alone, F.cross_entropy(logits, labels))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_multiplies_in_half_precision_and_keeps_float32_weights():
    seen = []

    class Look(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = nn.Sequential(nn.Flatten(), Look(48, 3))
    made = engine(model, precision="bf16", warmup_epochs=0)
    made.update(batch())
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert made.losses[0].dtype == torch.float32


def test_fp16_on_a_cpu_and_a_missing_gpu_are_refused():
    with pytest.raises(ArgumentError, match="precision 'fp16' needs a CUDA device: bf16 and fp32 run on a CPU"):
        Devices("cpu", "fp16")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="device is 'cuda', and torch finds no CUDA device"):
            Devices("cuda")
