"""Load the weights of a model from a file: all of them, or an error that leaves the model unchanged.

read       safetensors or a zip file of torch.save, recognized by its first bytes; nothing in it is executed
compare    every name, shape and dtype, before a number is copied
copy       into the tensors of the model, on their device and in their dtype
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from softless.errors import ArgumentError, FileError
from softless.io.torch_files import DTYPES, TensorDict, read_torch

DERIVED = ("relative_position_index", "attn_mask")  # buffers in Swin's files that a model computes itself
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DistributedDataParallel and torch.compile put before every name
_ZIP, _PICKLE, _OLD_TORCH = b"PK\x03\x04", b"\x80", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True)
class WeightsReport:
    """The report of `load_weights`: what it loaded, and what it left in the file.

    >>> import os, tempfile, torch, softless
    >>> layer, path = torch.nn.Linear(3, 2), os.path.join(tempfile.mkdtemp(), "layer.pth")
    >>> torch.save(layer.state_dict(), path)
    >>> report = softless.load_weights(layer, path)
    >>> report.format, report.key, report.tensors, report.nonfinite
    ('torch', None, 2, ())

    path       the file
    format     safetensors | torch
    key        the key of the weights in the file; None if the file itself is the dictionary
    prefix     the prefix that was removed from every name: "", "module." or "_orig_mod."
    tensors    the number of tensors loaded
    derived    entries of the file that the model computes itself; not loaded
    nonfinite  tensors that now hold NaN or infinity
    ignored    classes and functions that the file names; none was imported
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
    path   a safetensors file, or a file of torch.save (.pth, .pt, .bin); its name does not matter
    key    the dictionary to load; None takes the first of `state_dict_ema`, `model` and `state_dict`, or the file
           itself if it is a plain state dict
    fit    a function that changes the weights before they are compared; `softless.timm.fit_tables` resamples positions

    The order of the keys fits the files of the InLine authors. Their CSwin files have `state_dict_ema`, the averaged
    weights, which are the ones to use; `key="model"` loads the weights of the last step. All other files have `model`.

    Names and shapes must be those of the model. If not, a `FileError` lists every name that is missing, unexpected or
    mis-shaped, and the model is unchanged. Three differences are allowed. A file of a wrapped model has `module.` or
    `_orig_mod.` before every name. A model with a method `own_names` translates the names: Swin also accepts timm's.
    Swin's `relative_position_index` and `attn_mask` follow from the sizes of the model: a file may lack them, they are
    never loaded, and an index that differs from the model's is an error.

    Floating-point numbers are cast to the model's dtype; other dtypes must be equal. If several names share one
    parameter (tied weights), their numbers must be equal. NaN and infinity are loaded, with a warning.
    """
    path, state = _checked(model, path, key), model.state_dict()
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    try:
        form, checkpoint = _read(path, key)
        prefix = _prefix(checkpoint.tensors, own)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.tensors.items()}
        tensors = getattr(model, "own_names", dict)(tensors)
        tensors = tensors if fit is None else fit(tensors)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error.__cause__
    problems = mismatches(*({name: x for name, x in side.items() if not _derived(name)} for side in (tensors, own)))
    problems += _other_indices(tensors, model) + _untied(tensors, own, model)
    if problems:
        where = "" if checkpoint.key is None else f" under {checkpoint.key!r}"
        raise FileError(f"{path}: the weights{where} do not fit {type(model).__name__}: {'; '.join(problems)}")
    staged = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items() if not _derived(name)}
    nonfinite = tuple(name for name, tensor in staged.items() if not torch.isfinite(tensor).all())
    if nonfinite:
        warnings.warn(f"{path}: NaN or infinity is loaded in {', '.join(nonfinite)}", RuntimeWarning, stacklevel=2)
    model.load_state_dict(state | staged)
    derived = tuple(filter(_derived, tensors))
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
    """Return the format of a file, by its first bytes, and its weights."""
    start = _first_bytes(path)
    if start.startswith(_ZIP):
        return "torch", read_torch(path, key)
    if start[8:9] == b"{":
        return "safetensors", _read_safetensors(path, key)
    if start == _OLD_TORCH:
        raise FileError(
            "it has the format of torch before 1.6, which is not supported: convert it with "
            "torch.save(torch.load(path, weights_only=True), path)"
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
        raise FileError(f"key={key!r} was given, and a safetensors file has one dictionary and no key")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise FileError(f"it is no intact safetensors file ({error})") from error
    if strange := [f"{name!a} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
        raise FileError(f"it holds numbers that torch cannot convert: {', '.join(strange)}")
    return TensorDict(None, tensors, ())


def _prefix(tensors: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """Return the prefix of a wrapper, if every name in the file has it and no name of the model has."""
    for prefix in WRAPPERS if tensors else ():
        in_file, in_model = ([name.startswith(prefix) for name in names] for names in (tensors, own))
        if all(in_file) and not any(in_model):
            return prefix
    return ""


def _derived(name: str) -> bool:
    return name.rpartition(".")[2] in DERIVED


def _other_indices(tensors: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return the indices in the file that differ from the model's own, for a window of the same size."""
    modules, differ = dict(model.named_modules()), []
    for name, index in tensors.items():
        place, _, attribute = name.rpartition(".")
        own = getattr(modules.get(place), attribute, None) if attribute == DERIVED[0] else None
        if isinstance(own, Tensor) and own.shape == index.shape and not torch.equal(index, own.cpu()):
            differ.append(name)
    return [f"not the model's own index {', '.join(differ)}"] if differ else []


def mismatches(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Return every difference between saved tensors and a model's own in names, shapes and dtypes, by kind."""
    shared = [(name, tensors[name], own[name]) for name in tensors if name in own]
    kinds = {
        "missing": [name for name in own if name not in tensors],
        "unexpected": [ascii(name) for name in tensors if name not in own],
        "mis-shaped": [
            f"{name} (file {list(a.shape)}, model {list(b.shape)})" for name, a, b in shared if a.shape != b.shape
        ],
        "mistyped": [
            f"{name} (file {a.dtype}, model {b.dtype})"
            for name, a, b in shared
            if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point())
        ],
    }
    return [f"{kind} {', '.join(names)}" for kind, names in kinds.items() if names]


def _untied(tensors: dict[str, Tensor], own: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return the names that share a parameter, and for which the file has different numbers."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        loaded = tensors.get(name)
        if name in own and loaded is not None and loaded.shape == own[name].shape and not loaded.is_complex():
            names.setdefault(id(tensor), []).append(name)
    differ = []
    for first, *others in names.values():
        cast = tensors[first].to(own[first].dtype)
        casts = {name: tensors[name].to(own[name].dtype) for name in others}
        if unequal := [name for name, x in casts.items() if ((x != cast) & ~(x.isnan() & cast.isnan())).any()]:
            differ.append(f"{first} and {' and '.join(unequal)}")
    return [f"different numbers for what the model shares, {', '.join(differ)}"] if differ else []
