"""Every public callable with a call that is valid, and for each of its arguments another value.

A case is a callable, its baseline and the changes. `With(value, **others)` is a change that needs another baseline:
`shifted` means nothing without a window.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import softless
from softless import functional, parallel
from softless.data import open_images, open_splits
from softless.data.augment import PLAIN, Augment
from softless.data.loading import cached, loader
from softless.data.sampler import ResumableSampler
from softless.nn.maps import attention_maps
from softless.probes.capture import capture
from softless.probes.examination import examine
from softless.study.twins import twins_named
from softless.train.recipe import read_recipe


class With(NamedTuple):
    """A value, and what the baseline must say for it to mean something."""

    value: Any
    others: dict[str, Any]


class Case(NamedTuple):
    """`run` takes the arguments of `of`, and returns all that they may change."""

    of: Callable[..., Any]
    run: Callable[..., Any]
    base: dict[str, Any]
    changes: dict[str, Any]


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask(*hidden: int, tokens: int = 6) -> Tensor:
    found = torch.ones(2, tokens, dtype=torch.bool)
    found[0, list(hidden)] = False
    return found


def made(kind: type[nn.Module], *inputs: Any, **call: Any) -> Callable[..., Any]:
    """Builds a module from its options and runs it as in training, so that dropout shows."""

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        layer = kind(**options)
        torch.manual_seed(1)
        return dict(layer.state_dict()), layer(*inputs, **call)

    return run


def called(method: str, kind: type[nn.Module], **options: Any) -> Callable[..., Any]:
    """Runs a method of a module that is built alike each time."""

    def run(**call: Any) -> Any:
        torch.manual_seed(0)
        layer = kind(**options)
        torch.manual_seed(1)
        return getattr(layer, method)(**call)

    return run


X, OTHER = some(2, 6, 8), some(2, 6, 8, seed=1)
Q, K, V = (some(2, 4, 6, 8, seed=seed) for seed in (2, 3, 4))
BIAS = some(6, 6, seed=5)
TENSORS = {"q": Q, "k": K, "v": V}
OTHERS = {name: some(2, 4, 6, 8, seed=6) for name in "qkv"}
TAPS = some(2, 4, 9, 8, seed=7)
Attention, Longformer = softless.nn.Attention, softless.nn.LongformerAttention
SOFTMAX = softless.mechanism("softmax")
AGENT = softless.mechanism("agent", agents=4)
GENERAL = {"sim": lambda q, k: (q @ k.mT).exp()}


def state(seed: int) -> softless.State:
    x = some(2, 4, 5, 8, seed=seed)
    return softless.attention_with_state(x, x, x, "linear")[1]


def funneled(seed: int) -> softless.nn.Funneled:
    tokens = softless.nn.Tokens
    return softless.nn.Funneled(
        tokens(some(2, 4, 8, seed=seed), mask(tokens=4)), tokens(some(2, 6, 8, seed=seed), mask())
    )


def saved(folder: Path) -> dict[str, Path]:
    """Files of weights for a layer: a checkpoint with two dictionaries, and another."""
    one, two = ({"weight": some(2, 3, seed=seed), "bias": some(2, seed=seed)} for seed in (0, 1))
    torch.save({"model": one, "other": two}, folder / "one.pth")
    torch.save({"model": two}, folder / "two.pth")
    return {"one": folder / "one.pth", "two": folder / "two.pth"}


def language_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=9, initializer_range=0.5, **sizes))


def token_rows(seed: int) -> Tensor:
    return torch.randint(3, 9, (16, 6), generator=torch.Generator().manual_seed(seed))


def converted(model: LlamaForCausalLM, **options: Any) -> dict[str, Any]:
    """The document of a conversion, which is undone; without what was timed."""
    conversion = softless.convert(model, **options)
    conversion.undo()
    told = ("date", "seconds", "machine", "steps", "seed", "budget")  # when, where, and what was asked
    return {name: str(value) for name, value in conversion.document.items() if name not in told}


def load(model: nn.Module | None = None, **options: Any) -> Any:
    model = nn.Linear(3, 2) if model is None else model
    report = softless.load_weights(model, **options)
    return dict(model.state_dict()), report.key, report.tensors


def report(**options: Any) -> Any:
    return softless.threshold_report(**options).__dict__


def shared(**options: Any) -> Tensor:
    """`softless.parallel.attention` in a group of one."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return parallel.attention(**options)
    finally:
        dist.destroy_process_group()


def captured(model: nn.Module, **options: Any) -> Any:
    with torch.no_grad(), capture(model, **options) as found:
        out = model(some(2, 3, 16, 16))
    return out, [layer.name for layer in found.layers]


def tiny(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"img_size": 16, "patch_size": 4, "dims": 16, "depths": 2, "heads": 2, "num_classes": 3}
    return softless.create_model("deit_tiny", **sizes | options).eval()


def batches(**options: Any) -> Any:
    torch.manual_seed(0)
    found = loader(**options | {"sampler": deepcopy(options["sampler"])})
    return len(found), [tuple(batch) for batch in found][:2]


def decoded(**options: Any) -> Any:
    heard: list[int] = []
    return tuple(cached(**{"tick": heard.append} | options)), heard


def examined(**options: Any) -> Any:
    return repr(examine(**options))


class Few:
    """The first images of the embedded set."""

    def __init__(self, split: str, count: int = 40):
        self.images = open_images("digits", split)
        self.count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.images, name)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.images[index]

    @property
    def labels(self) -> Any:
        return self.images.labels[: self.count]


FEW, FEWER = Few("train"), Few("test")
FUNCTIONS: dict[str, Case] = {
    "attention_with_residual": Case(
        functional.attention_with_residual,
        functional.attention_with_residual,
        {**TENSORS, "taps": TAPS, "grid": (2, 3)},
        {
            **OTHERS,
            "taps": TAPS + 1,
            "mechanism": "softmax",
            "grid": (3, 2),
            "prefix": 1,
            "key_mask": mask(2),
            "scale": 0.3,
            "inputs": {"beta": some(2, 4, 6)},
        },
    ),
    "attention_qkv": Case(
        functional.attention_qkv,
        functional.attention_qkv,
        {"qkv": some(2, 6, 3, 4, 8)},
        {
            "qkv": some(2, 6, 3, 4, 8, seed=1),
            "mechanism": "softmax",
            "taps": With(TAPS + 1, {"grid": (2, 3), "taps": TAPS}),
            "grid": (2, 3),
            "prefix": 1,
            "key_mask": mask(2),
            "inputs": {"beta": some(2, 4, 6)},
        },
    ),
    "threshold_report": Case(
        softless.threshold_report,
        report,
        {"q": 3 * Q, "k": K},
        {
            **{name: OTHERS[name] for name in "qk"},
            "tau": 2,
            "expansion": "minimax",
            "tail": "mean",
            "is_causal": True,
            "key_mask": mask(2),
            "bias": BIAS,
            "scale": 0.1,
        },
    ),
    "mechanism": Case(softless.mechanism, softless.mechanism, {"name": "linear"}, {"name": "inline", "options": {}}),
    "list_mechanisms": Case(softless.list_mechanisms, softless.list_mechanisms, {}, {}),
    "convert": Case(
        softless.convert,
        converted,
        {"model": language_model(), "data": token_rows(0), "candidates": ["linear"], "steps": 1, "budget": 1.0},
        {
            "model": language_model(1),
            "data": token_rows(1),
            "budget": 1e-9,
            "candidates": ["inline"],
            "metric": "accuracy",
            "steps": 2,
            "layers": 1,
            "heal": 1e-4,
            "rank": 2,
            "compare": True,
            "seed": 1,
        },
    ),
    "list_models": Case(softless.list_models, softless.list_models, {}, {"pretrained": True}),
    "parallel.attention": Case(
        parallel.attention,
        shared,
        TENSORS,
        {
            **OTHERS,
            "mechanism": "linear",
            "group": "all",
            "is_causal": True,
            "key_mask": mask(2),
            "scale": 0.3,
            "inputs": {"beta": some(2, 4, 6)},
        },
    ),
    "nn.significance": Case(
        softless.nn.significance,
        softless.nn.significance,
        {"weights": some(2, 4, 6, 6).softmax(-1)},
        {"weights": some(2, 4, 6, 6, seed=1).softmax(-1), "key_mask": mask(2)},
    ),
    "nn.pool_tokens": Case(
        softless.nn.pool_tokens,
        softless.nn.pool_tokens,
        {"x": X},
        {"x": OTHER, "key_mask": mask(2), "stride": 3, "width": 4, "mode": "max", "prefix": 1},
    ),
    "nn.repeat_tokens": Case(
        softless.nn.repeat_tokens,
        softless.nn.repeat_tokens,
        {"x": X, "stride": 2, "length": 10},
        {"x": OTHER, "stride": 3, "length": 9, "prefix": 1},
    ),
    "nn.maps.attention_maps": Case(
        attention_maps,
        lambda model, inputs: [tuple(each) for each in attention_maps(model, *inputs)],
        {"model": tiny(), "inputs": [some(1, 3, 16, 16)]},
        {"model": tiny(1), "inputs": [some(1, 3, 16, 16, seed=1)]},
    ),
    "probes.capture": Case(
        capture, captured, {"model": tiny()}, {"model": tiny(1), "edit": lambda _layer, weights: weights.roll(1, -1)}
    ),
    "probes.examine": Case(
        examine,
        examined,
        {"model": tiny(), "batches": [some(2, 3, 16, 16)]},
        {
            "model": tiny(1),
            "batches": [some(2, 3, 16, 16, seed=1)],
            "forward": lambda model, batch: model(2 * batch),
            "only": lambda name: "0" in name,
            "tau": (3.0,),
        },
    ),
    "data.open_images": Case(
        open_images,
        lambda **options: (len(open_images(**options)), open_images(**options).classes),
        {"source": None, "split": "train"},
        {"source": "nowhere", "split": "test"},
    ),
    "data.open_splits": Case(
        open_splits,
        lambda **options: [*map(len, open_splits(**options))],
        {"source": "digits"},
        {"source": "nowhere", "hold_out": 0.1},
    ),
    "data.ResumableSampler": Case(
        ResumableSampler,
        lambda **options: list(ResumableSampler(**options)),
        {"length": 12, "seed": 0},
        {"length": 13, "seed": 1, "shuffle": False, "rank": With(1, {"ranks": 2}), "ranks": 2, "repeats": 2},
    ),
    "data.loader": Case(
        loader,
        batches,
        {
            "images": FEW,
            "size": 8,
            "batch": 10,
            "sampler": ResumableSampler(40, seed=0),
            "train_transform": True,
            "augment": PLAIN,
            "workers": 0,
        },
        {
            "images": FEWER,
            "size": 10,
            "batch": 20,
            "sampler": ResumableSampler(40, seed=1),
            "train_transform": With(False, {"augment": Augment()}),
            "augment": Augment(),
            "workers": -1,
            "on_bad_image": "ignore",
            "device": "nowhere",
        },
    ),
    "data.cached": Case(
        cached, decoded, {"images": FEW, "size": 8}, {"images": FEWER, "size": 10, "tick": lambda _: None}
    ),
    "train.read_recipe": Case(
        read_recipe, read_recipe, {"name": "digits"}, {"name": "nowhere", "changes": [("epochs", "3")]}
    ),
    "train.twins_named": Case(
        twins_named,
        twins_named,
        {"ids": ["inline-cut2"]},
        {"ids": ["softmax"], "recipe": read_recipe("digits")},
    ),
}

SIZES = {"dim": 8, "heads": 2}
MODULES: dict[str, Case] = {
    "nn.Attention": Case(
        Attention,
        made(Attention, X, (2, 3)),
        {**SIZES, "mechanism": SOFTMAX},
        {
            "dim": 16,
            "heads": 4,
            "mechanism": "inline",
            "local": True,
            "num_heads": 4,
            "kv_heads": 1,
            "window": 2,
            "shifted": With(True, {"window": 2}),
            "qk_norm": True,
            "rotary": True,
            "qkv_bias": False,
            "qk_conv": True,
            "attn_drop": 0.5,
            "proj_drop": 0.5,
        },
    ),
    "nn.Attention alone": Case(Attention, made(Attention, X), SIZES, {"shifted": True, "attn_drop": 0.5}),
    "nn.LongformerAttention": Case(
        Longformer,
        made(Longformer, X),
        {**SIZES, "window": 1},
        {"dim": 16, "heads": 4, "window": 2, "global_tokens": 2, "kv_heads": 1, "qkv_bias": False, "proj_drop": 0.5},
    ),
    "nn.MultiheadAttention": Case(
        softless.nn.MultiheadAttention,
        made(softless.nn.MultiheadAttention, X, X, X),
        {"embed_dim": 8, "num_heads": 2, "mechanism": SOFTMAX},
        {
            "embed_dim": 16,
            "num_heads": 4,
            "mechanism": "inline",
            "dropout": 0.5,
            "bias": False,
            "batch_first": True,
            "kv_heads": 1,
            "qk_norm": True,
            "rotary": True,
        },
    ),
    "nn.LocalResidual": Case(
        softless.nn.LocalResidual,
        made(softless.nn.LocalResidual, some(2, 8), some(2, 2, 6, 4), grid=(2, 3)),
        SIZES,
        {"dim": 16, "heads": 4},
    ),
    "nn.PreNorm": Case(
        softless.nn.PreNorm,
        lambda dim, inner: (softless.nn.PreNorm(dim, inner).state_dict(), softless.nn.PreNorm(8, inner)(X)),
        {"dim": 8, "inner": nn.Identity()},
        {"dim": 6, "inner": nn.ReLU()},
    ),
    "nn.Reversible": Case(
        softless.nn.Reversible,
        lambda pairs: softless.nn.Reversible(pairs)(X),
        {"pairs": [(nn.Identity(), nn.ReLU())]},
        {"pairs": [(nn.Identity(), nn.Tanh())]},
    ),
    "nn.EliminationEncoder": Case(
        softless.nn.EliminationEncoder,
        made(softless.nn.EliminationEncoder, X),
        {**SIZES, "depth": 2, "length": 6},
        {"dim": 16, "heads": 4, "depth": 3, "length": 7, "mechanism": "inline", "ratio": 2},
    ),
    "nn.FunnelEncoder": Case(
        softless.nn.FunnelEncoder,
        made(softless.nn.FunnelEncoder, X),
        {**SIZES, "blocks": (1, 1)},
        {"dim": 16, "heads": 4, "blocks": (1, 2), "mechanism": "inline", "pool": "max", "prefix": 0, "hidden": 5},
    ),
    "nn.FunnelDecoder": Case(
        softless.nn.FunnelDecoder,
        made(softless.nn.FunnelDecoder, funneled(0)),
        {**SIZES, "blocks": 2},
        {"dim": 16, "heads": 4, "blocks": 3, "layers": 3, "mechanism": "inline", "prefix": 0, "hidden": 5},
    ),
    "nn.StridedFeedForward": Case(
        softless.nn.StridedFeedForward,
        made(softless.nn.StridedFeedForward, some(2, 5, 8)),
        {"dim": 8},
        {"dim": 6, "hidden": 5, "stride": 3, "width": 3, "renormalize": True},
    ),
}
METHODS: dict[str, Case] = {
    "nn.Attention.with_state": Case(
        Attention.with_state,
        called("with_state", Attention, dim=32, heads=4, mechanism="linear"),
        {"x": some(2, 6, 32)},
        {"x": some(2, 6, 32, seed=1), "state": state(0), "key_mask": mask(2)},
    ),
    "nn.Attention.with_weights": Case(
        Attention.with_weights, called("with_weights", Attention, **SIZES), {"x": X}, {"x": OTHER, "key_mask": mask(2)}
    ),
    "nn.LongformerAttention.forward": Case(
        Longformer.forward,
        called("forward", Longformer, **SIZES, window=1),
        {"x": X},
        {
            "x": OTHER,
            "grid": (3, 3),
            "context": OTHER,
            "key_mask": mask(2),
            "is_causal": True,
            "bias": BIAS,
            "attn_mask": BIAS,
        },
    ),
    "nn.MultiheadAttention.forward": Case(
        softless.nn.MultiheadAttention.forward,
        called(
            "forward", softless.nn.MultiheadAttention, embed_dim=8, num_heads=2, mechanism=SOFTMAX, batch_first=True
        ),
        {"query": X, "key": X, "value": X},
        {
            "query": OTHER,
            "key": OTHER,
            "value": OTHER,
            "key_padding_mask": ~mask(2),
            "need_weights": True,
            "attn_mask": some(6, 6),
            "is_causal": True,
        },
    ),
    "nn.LocalResidual.forward": Case(
        softless.nn.LocalResidual.forward,
        called("forward", softless.nn.LocalResidual, **SIZES),
        {"context": some(2, 8), "v": some(2, 2, 6, 4), "grid": (2, 3)},
        {
            "context": some(2, 8, seed=1),
            "v": some(2, 2, 6, 4, seed=1),
            "grid": (3, 2),
            "prefix": 1,
        },
    ),
    **{
        f"nn.{kind.__name__}.forward": Case(
            kind.forward, called("forward", kind, **options), {"x": X}, {"x": OTHER, "key_mask": mask(2)}
        )
        for kind, options in (
            (softless.nn.EliminationEncoder, {**SIZES, "depth": 2, "length": 6}),
            (softless.nn.FunnelEncoder, {**SIZES, "blocks": (1, 1)}),
            (softless.nn.StridedFeedForward, {"dim": 8}),
        )
    },
    "nn.FunnelDecoder.forward": Case(
        softless.nn.FunnelDecoder.forward,
        called("forward", softless.nn.FunnelDecoder, **SIZES, blocks=2),
        {"encoded": funneled(0)},
        {"encoded": funneled(1)},
    ),
    "nn.PreNorm.forward": Case(
        softless.nn.PreNorm.forward,
        lambda x, context=None: softless.nn.PreNorm(8, Attention(8, 2))(x, **(context or {})),
        {"x": X},
        {"x": OTHER, "context": {"key_mask": mask(2)}},
    ),
    "nn.Reversible.forward": Case(
        softless.nn.Reversible.forward,
        lambda x, context=None: softless.nn.Reversible([(Attention(8, 2), nn.ReLU())])(x, **(context or {})),
        {"x": X},
        {"x": OTHER, "context": {"key_mask": mask(2)}},
    ),
}

PYRAMID = {"dims": (16, 32), "depths": (2, 1), "heads": (2, 4)}
FAMILIES: dict[str, dict[str, Any]] = {
    "inline_deit_tiny": {"patch_size": 4, "dims": 16, "depths": 2, "heads": 2},
    "inline_pvt_tiny": {"patch_size": 2, **PYRAMID},
    "inline_swin_tiny": {"patch_size": 2, **PYRAMID},
    "inline_cswin_tiny": {"patch_size": 2, **PYRAMID},
}


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    found = softless.create_model(**options)
    weights = dict(found.state_dict())
    if next(found.parameters()).is_meta:
        return [(name, tensor.shape) for name, tensor in weights.items()]
    torch.manual_seed(1)
    images = some(2, found.in_chans, 16, 16).to(next(found.parameters()).dtype)
    return weights, found.train()(images), found.pretrained_cfg


def fits(other: str, name: str) -> bool:
    """Whether it is another model that takes the same sizes."""
    return other != name and ("deit" in other) == ("deit" in name)


def model_case(name: str) -> Case:
    one = len(FAMILIES[name]["dims"]) if isinstance(FAMILIES[name]["dims"], tuple) else 1
    changes = {
        "name": next(other for other in ("deit_tiny", "inline_swin_tiny", "inline_pvt_tiny") if fits(other, name)),
        "mechanism": "linear",
        "local": False,
        "qk_conv": True,
        "window": 2,
        "pattern": "S" + "I" * (one - 1),
        "num_classes": 4,
        "img_size": 32,
        "patch_size": 8,
        "dims": 32 if one == 1 else (32, 64),
        "depths": 1 if one == 1 else (1, 1),
        "heads": 4 if one == 1 else (4, 8),
        "pretrained": True,
        "device": "meta",
        "dtype": torch.float64,
        "in_chans": 4,
        "global_pool": "",
        "drop_rate": 0.5,
        "proj_drop_rate": 0.5,
        "attn_drop_rate": 0.5,
        "drop_path_rate": 0.5,
        "position_std": 0.5,
        "weight_std": 0.5,
        "typo": 1,
    }
    return Case(
        softless.create_model, model, {"name": name, "img_size": 16, "num_classes": 3, **FAMILIES[name]}, changes
    )


MODELS = {f"create_model {name}": model_case(name) for name in FAMILIES}
MODELS["create_model in windows"] = Case(
    softless.create_model,
    model,
    {"name": "inline_swin_tiny", "img_size": 16, "num_classes": 3, **FAMILIES["inline_swin_tiny"]},
    {
        "window": With((2, 2), {"pattern": "IS"}),
        "depths": With((2, 2), {"window": 2}),
        "attn_drop_rate": With(0.5, {"mechanism": "softmax"}),
        "drop_path_rate": With(0.5, {"depths": 1, "dims": 16, "heads": 2}),
    },
)
LOADING = partial(Case, softless.load_weights, load)
