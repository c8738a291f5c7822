"""Convert a training to the tensors and numbers of a checkpoint, and back; the same for any number of ranks.

    model, ema     by parameter name
    optimizer      NAME/exp_avg, NAME/exp_avg_sq, NAME/step
    progress       losses and norms that were not logged yet; how many gradients in a row overflowed

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
from softless.io.weights import mismatches
from softless.train.engine import Engine

Parts = dict[str, dict[str, Tensor]]
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARED_OUT = StateDictOptions(full_state_dict=True)


def pack(engine: Engine) -> tuple[Parts, dict[str, Any]]:
    """Return the state of an engine. Every rank must call this, and rank 0 gets all of the state."""
    gathered: Any = get_optimizer_state_dict(engine.plain, engine.optimizer, options=GATHERED)
    moments = gathered.get("state", {})  # only rank 0 has it
    parts = {
        "model": weights(engine.plain),
        "optimizer": {f"{name}/{kind}": value for name, kinds in moments.items() for kind, value in kinds.items()},
        "progress": {
            "losses": torch.stack(engine.losses).cpu() if engine.losses else torch.zeros(0),
            "norms": torch.stack(engine.norms).cpu() if engine.norms else torch.zeros(0),
            "overflows": engine.overflows.cpu(),
        },
    }
    if engine.ema is not None:
        parts["ema"] = weights(engine.ema.module)
    scaler = engine.devices.scaler
    return parts, {"step": engine.step, "scaler": None if scaler is None else scaler.state_dict()}


def unpack(engine: Engine, saved: Checkpoint) -> None:
    """Load a checkpoint into an engine. If a tensor does not fit, raise an error that names it, and change nothing."""
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
    """Return all tensors of a model, on the CPU, by their names without wrappers."""
    gathered: Any = get_model_state_dict(model, options=GATHERED)
    return dict(gathered)


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
        for kind in MOMENTS:  # the fused AdamW needs the memory layout of the parameter, also with channels last
            moments[kind] = torch.empty_like(parameter).copy_(moments[kind])


def _must_fit(saved: Checkpoint, part: str, own: Mapping[str, Tensor]) -> None:
    if problems := mismatches(saved.parts[part], own):
        raise FileError(f"the checkpoint {saved.path} does not fit this model: in {part}, {'; '.join(problems)}")
