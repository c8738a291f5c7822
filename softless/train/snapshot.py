"""The state of a training as tensors and numbers for a checkpoint, the same for any number of ranks.

    model, ema     by parameter name
    optimizer      NAME/exp_avg, NAME/exp_avg_sq, NAME/step
    progress       losses and norms that no line of log has yet; gradients in a row that overflowed

The schedule and all randomness follow from the number of the update and the seed, which are saved too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from softless.errors import FileError
from softless.io.checkpoint import Checkpoint
from softless.train.engine import Engine

Parts = dict[str, dict[str, Tensor]]
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARED_OUT = StateDictOptions(full_state_dict=True)


def pack(engine: Engine) -> tuple[Parts, dict[str, Any]]:
    """Return the state of an engine. Every rank must call this, and rank 0 gets all of it."""
    parts = {"model": weights(engine.plain), "optimizer": _optimizer(engine)}
    if engine.ema is not None:
        parts["ema"] = weights(engine.ema.module)
    empty = torch.zeros(0)
    parts["progress"] = {
        "losses": torch.stack(engine.losses).cpu() if engine.losses else empty,
        "norms": torch.stack(engine.norms).cpu() if engine.norms else empty,
        "overflows": engine.overflows.cpu(),
    }
    scaler = engine.devices.scaler
    return parts, {"step": engine.step, "scaler": None if scaler is None else scaler.state_dict()}


def unpack(engine: Engine, saved: Checkpoint) -> None:
    """Load a checkpoint into an engine; if something does not fit, name it and change nothing."""
    wanted = {"model", "optimizer", "progress"} | ({"ema"} if engine.ema is not None else set())
    if saved.parts.keys() != wanted:
        held, needed = (", ".join(sorted(names)) for names in (saved.parts, wanted))
        raise FileError(f"the checkpoint {saved.path} holds {held}, and {needed} are needed")
    names = {name: tensor for name, tensor in engine.plain.named_parameters() if tensor.requires_grad}
    moments: dict[str, Tensor] = {f"{n}/{kind}": p for n, p in names.items() for kind in MOMENTS}
    moments |= {f"{n}/step": torch.zeros(()) for n in names}
    _must_fit(saved, "model", engine.plain.state_dict())
    _must_fit(saved, "optimizer", moments)
    if engine.ema is not None:
        _must_fit(saved, "ema", engine.ema.module.state_dict())
        set_model_state_dict(engine.ema.module, dict(saved.parts["ema"]), options=SHARED_OUT)
    set_model_state_dict(engine.plain, dict(saved.parts["model"]), options=SHARED_OUT)
    _set_optimizer(engine, saved.parts["optimizer"])
    device = engine.devices.device
    progress = {name: tensor.to(device) for name, tensor in saved.parts["progress"].items()}
    engine.losses, engine.norms = list(progress["losses"]), list(progress["norms"])
    engine.overflows.copy_(progress.get("overflows", engine.overflows))  # older runs did not count it
    engine.step = saved.step
    if engine.devices.scaler is not None and saved.state["engine"]["scaler"] is not None:
        engine.devices.scaler.load_state_dict(saved.state["engine"]["scaler"])


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model, on the CPU, by the names they have without wrappers."""
    gathered: Any = get_model_state_dict(model, options=GATHERED)
    return dict(gathered)


def _optimizer(engine: Engine) -> dict[str, Tensor]:
    gathered: Any = get_optimizer_state_dict(engine.plain, engine.optimizer, options=GATHERED)
    state = gathered.get("state", {})  # only rank 0 has it
    return {f"{name}/{kind}": value for name, kinds in state.items() for kind, value in kinds.items()}


def _set_optimizer(engine: Engine, flat: Mapping[str, Tensor]) -> None:
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, _, kind = key.rpartition("/")
        state.setdefault(name, {})[kind] = value
    names = {id(parameter): name for name, parameter in engine.plain.named_parameters()}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in engine.optimizer.param_groups
    ]
    both: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(engine.plain, engine.optimizer, both, options=SHARED_OUT)
    for parameter, moments in engine.optimizer.state.items():
        for kind in MOMENTS:  # the fused AdamW pairs numbers by their place in memory, also with channels last
            moments[kind] = torch.empty_like(parameter).copy_(moments[kind])


def _must_fit(saved: Checkpoint, part: str, own: Mapping[str, Tensor]) -> None:
    tensors = saved.parts[part]
    shapes = ((name, list(tensors[name].shape), list(own[name].shape)) for name in tensors if name in own)
    problems = {
        "missing": [name for name in own if name not in tensors],
        "unexpected": [name for name in tensors if name not in own],
        "mis-shaped": [f"{name} (saved {theirs}, model {ours})" for name, theirs, ours in shapes if theirs != ours],
    }
    if sentences := [f"{kind} {', '.join(names)}" for kind, names in problems.items() if names]:
        raise FileError(f"the checkpoint {saved.path} does not fit this model: in {part}, {'; '.join(sentences)}")
