"""The backbone that a recipe names, and its options."""

from dataclasses import dataclass
from typing import Any

from softless.train.settings import check_type


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The options of `softless.create_model`; None keeps the default of the named model."""

    name: str = "inline_deit_tiny"
    mechanism: str | dict[str, Any] | None = None  # a name, or {name = "linear", phi = "relu"}
    local: bool | None = None
    qk_conv: bool | None = None
    window: int | list[Any] | None = None
    pattern: str | None = None
    patch_size: int | None = None
    dims: int | list[Any] | None = None
    depths: int | list[Any] | None = None
    heads: int | list[Any] | None = None
    global_pool: str | None = None
    drop_path_rate: float = 0.0
    position_std: float | None = None
    weight_std: float | None = None

    def __post_init__(self) -> None:
        for name, kind in {
            "local": bool,
            "qk_conv": bool,
            "drop_path_rate": float,
            "position_std": float,
            "weight_std": float,
        }.items():
            if getattr(self, name) is not None:
                check_type(f"model.{name}", getattr(self, name), kind)
