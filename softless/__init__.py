"""softless: attention without the softmax.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()       # [batch, heads, tokens, dim]
    >>> softless.attention(q, k, v, "inline").shape
    torch.Size([1, 8, 4096, 64])

Names are imported when first used: `import softless` alone loads neither torch nor triton nor timm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softless import errors, nn, parallel
    from softless.algebra.state import NearState, State
    from softless.conversion.pipeline import Conversion, convert
    from softless.conversion.rebuilding import load_converted
    from softless.functional import attention, attention_weights, attention_with_state
    from softless.io.weights import WeightsReport, load_weights
    from softless.mechanisms import Mechanism, list_mechanisms, mechanism
    from softless.models import create_model, list_models
    from softless.threshold import ThresholdReport, threshold_report

    __version__: str

_NAMES = {
    "softless.algebra.state": ("NearState", "State"),
    "softless.conversion.pipeline": ("Conversion", "convert"),
    "softless.conversion.rebuilding": ("load_converted",),
    "softless.functional": ("attention", "attention_weights", "attention_with_state"),
    "softless.io.weights": ("WeightsReport", "load_weights"),
    "softless.mechanisms": ("Mechanism", "list_mechanisms", "mechanism"),
    "softless.models": ("create_model", "list_models"),
    "softless.threshold": ("ThresholdReport", "threshold_report"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Conversion",
    "Mechanism",
    "NearState",
    "State",
    "ThresholdReport",
    "WeightsReport",
    "attention",
    "attention_weights",
    "attention_with_state",
    "convert",
    "create_model",
    "errors",
    "list_mechanisms",
    "list_models",
    "load_converted",
    "load_weights",
    "mechanism",
    "nn",
    "parallel",
    "threshold_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in ("nn", "errors", "parallel"):
        return import_module(f"softless.{name}")
    elif name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("softless")
        except PackageNotFoundError:
            value = "0+uninstalled"
    else:
        raise AttributeError(f"module 'softless' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
