"""A model's weights from a file: all of them, or an error and the model as it was.

read       safetensors or torch.save's zip, told apart by their first bytes; nothing in either is executed
compare    every name, shape and dtype, before a single number is copied
copy       into the model's own tensors, on their device, in their dtype
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from softless.errors import ArgumentError, FileError
from softless.io.torch_files import DTYPES, TensorDict, read_torch

DERIVED = ("relative_position_index", "attn_mask")
"""What Swin's files keep beside the weights and a model works out by itself."""

WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""

_ZIP, _PICKLE, _OLD_TORCH = b"PK\x03\x04", b"\x80", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True)
class WeightsReport:
    """What `load_weights` read, and what it left.

    >>> import os, tempfile, torch, softless
    >>> layer, path = torch.nn.Linear(3, 2), os.path.join(tempfile.mkdtemp(), "layer.pth")
    >>> torch.save(layer.state_dict(), path)
    >>> report = softless.load_weights(layer, path)
    >>> report.format, report.key, report.tensors, report.nonfinite
    ('torch', None, 2, ())

    path       the file
    format     safetensors | torch
    key        where in the file the weights stood; None if the file is the dictionary
    prefix     what was taken off every name: "", "module." or "_orig_mod."
    tensors    how many were loaded
    derived    entries the model works out by itself, left in the file
    nonfinite  tensors that now hold NaN or infinity
    ignored    classes and functions the file names and nothing imported
    """

    path: Path
    format: str
    key: str | None
    prefix: str
    tensors: int
    derived: tuple[str, ...]
    nonfinite: tuple[str, ...]
    ignored: tuple[str, ...]


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    fit: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> WeightsReport:
    """Load a file's weights into a model, executing nothing in the file.

    >>> import os, tempfile, torch, softless
    >>> trained, fresh = (softless.nn.Attention(dim=12, heads=3, local=True) for _ in range(2))
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint.pth")
    >>> torch.save({"model": trained.state_dict(), "epoch": 299}, path)
    >>> report = softless.load_weights(fresh, path)
    >>> report.format, report.key, report.tensors
    ('torch', 'model', 8)
    >>> x = torch.randn(2, 16, 12)                              # [batch, tokens, dim]
    >>> torch.equal(fresh(x, grid=(4, 4)), trained(x, grid=(4, 4)))
    True

    model  any module; its parameters stay on their device, in their dtype
    path   a safetensors file, or one that torch.save wrote (.pth, .pt, .bin), whatever it is called
    key    which of the file's dictionaries; None takes the first of `state_dict_ema`, `model` and `state_dict`, or the
           file itself where it is a plain state dict
    fit    what is done to the file's weights before they are compared: `softless.timm.fit_tables` resamples positions

    The order is the InLine authors': of their files only CSwin's have `state_dict_ema`, the averaged weights, which are
    the ones to use; the others have `model`. `key="model"` gives CSwin's last step instead.

    Names and shapes must be the model's own, or a `FileError` names each one that is missing, unexpected or mis-shaped
    and the model stays as it was. Three differences are allowed. A file saved from a wrapped model has `module.` or
    `_orig_mod.` before every name. A model that has a method `own_names` is asked for its own: Swin knows timm's. And
    Swin's `relative_position_index` and `attn_mask` follow from the model's sizes: either side may lack them, they are
    never loaded, and an index that differs from the model's is an error. Floating point is cast to the model's dtype;
    other dtypes must be equal. Names that share one parameter (tied weights) must hold the same numbers, or the error
    names them. NaN and infinity are loaded as they are, with a warning, and named in the report.
    """
    path, state = _checked(model, path, key), model.state_dict()
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    try:
        form, checkpoint = _read(path, key)
        prefix = _prefix(checkpoint.tensors, own)
        given = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.tensors.items()}
        given = getattr(model, "own_names", dict)(given)
        given = given if fit is None else fit(given)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error.__cause__
    problems = _problems(given, own, dict(model.named_modules())) + _untied(given, own, model)
    if problems:
        where = "" if checkpoint.key is None else f" under {checkpoint.key!r}"
        raise FileError(f"{path}: the weights{where} do not fit {type(model).__name__}: {'; '.join(problems)}")
    staged = {name: tensor.to(own[name].dtype) for name, tensor in given.items() if not _derived(name)}
    nonfinite = tuple(name for name, tensor in staged.items() if not torch.isfinite(tensor).all())
    if nonfinite:
        warnings.warn(f"{path}: NaN or infinity is loaded in {', '.join(nonfinite)}", RuntimeWarning, stacklevel=2)
    model.load_state_dict(state | staged)
    derived = tuple(filter(_derived, given))
    return WeightsReport(path, form, checkpoint.key, prefix, len(staged), derived, nonfinite, checkpoint.ignored)


def _checked(model: nn.Module, path: str | os.PathLike[str], key: str | None) -> Path:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {type(model).__name__}, and a torch.nn.Module is needed")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ArgumentError(
                f"the model's {name} has no memory to load into: run a lazy model, or call model.to_empty()"
            )
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path is {type(path).__name__}, and the name of a file is needed")
    if not (key is None or isinstance(key, str)):
        raise ArgumentError(f"key is {type(key).__name__}, and a string or None is needed")
    return Path(path)


def _read(path: Path, key: str | None) -> tuple[str, TensorDict]:
    """The file's format and its weights, by its first bytes."""
    start = _first_bytes(path)
    if start.startswith(_ZIP):
        return "torch", read_torch(path, key)
    if start[8:9] == b"{":
        return "safetensors", _read_safetensors(path, key)
    if start == _OLD_TORCH:
        raise FileError(
            "it is in torch's format of before 1.6, which is not read here: torch.save(torch.load(path, "
            "weights_only=True), path) writes it anew"
        )
    if start.startswith(_PICKLE):
        raise FileError("it is a bare pickle, and neither safetensors nor a zip file of torch.save")
    raise FileError(f"it begins with {start[:8]!r}, and is neither safetensors nor a zip file of torch.save")


def _first_bytes(path: Path) -> bytes:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_OLD_TORCH))
    except OSError as error:
        raise FileError(f"it cannot be read: {error.strerror}") from error
    raise FileError("there is no such file")


def _read_safetensors(path: Path, key: str | None) -> TensorDict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if key is not None:
        raise FileError(f"key={key!r} was asked for, and a safetensors file has one dictionary and no key")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise FileError(f"it is no intact safetensors file ({error})") from error
    if strange := [f"{name!a} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
        raise FileError(f"it holds numbers that torch cannot convert: {', '.join(strange)}")
    return TensorDict(None, tensors, ())


def _prefix(given: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """The wrapper's prefix, if every name in the file has it and the model's have not."""
    for prefix in WRAPPERS:
        if (
            given
            and all(name.startswith(prefix) for name in given)
            and not any(name.startswith(prefix) for name in own)
        ):
            return prefix
    return ""


def _derived(name: str) -> bool:
    return name.rpartition(".")[2] in DERIVED


def _contradicts(name: str, index: Tensor, modules: dict[str, nn.Module]) -> bool:
    """Whether a file's index is not the one that the module works out, for a window of the same size."""
    place, _, attribute = name.rpartition(".")
    own = getattr(modules.get(place), attribute, None) if attribute == DERIVED[0] else None
    return isinstance(own, Tensor) and own.shape == index.shape and not torch.equal(index, own.cpu())


def _problems(given: dict[str, Tensor], own: dict[str, Tensor], modules: dict[str, nn.Module]) -> list[str]:
    """Every way in which the two differ, a kind at a time."""
    missing = [name for name in own if name not in given and not _derived(name)]
    unexpected = [ascii(name) for name in given if name not in own and not _derived(name)]
    shared = [(name, given[name], own[name]) for name in given if name in own and not _derived(name)]
    shapes = [f"{name} (file {list(a.shape)}, model {list(b.shape)})" for name, a, b in shared if a.shape != b.shape]
    dtypes = [
        f"{name} (file {a.dtype}, model {b.dtype})"
        for name, a, b in shared
        if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point())
    ]
    indices = [name for name, tensor in given.items() if _contradicts(name, tensor, modules)]
    kinds = {"missing": missing, "unexpected": unexpected, "mis-shaped": shapes, "mistyped": dtypes}
    kinds["not the model's own index"] = indices
    return [f"{kind} {', '.join(names)}" for kind, names in kinds.items() if names]


def _untied(given: dict[str, Tensor], own: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of one parameter to which the file gives different numbers: only the last of them would be loaded."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        loaded = given.get(name)
        if name in own and loaded is not None and loaded.shape == own[name].shape and not loaded.is_complex():
            names.setdefault(id(tensor), []).append(name)
    differ = []
    for first, *others in names.values():
        cast = given[first].to(own[first].dtype)
        if unequal := [name for name in others if not _same(cast, given[name].to(own[name].dtype))]:
            differ.append(f"{first} and {' and '.join(unequal)}")
    return [f"different numbers for what the model shares, {', '.join(differ)}"] if differ else []


def _same(a: Tensor, b: Tensor) -> bool:
    """The same numbers, NaN among them."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
