"""Change the configuration of a model: its mechanism, windows, pattern, or its sizes.

>>> from softless.models.configure import reshaped
>>> from softless.models.table import CONFIGS
>>> small = reshaped(CONFIGS["inline_deit_tiny"], patch_size=2, dims=64, depths=4, heads=2)
>>> small.patch, small.dims, small.depths, small.mixed
(2, (64,), (4,), (4,))
"""

from dataclasses import replace
from typing import Any

from softless.errors import ArgumentError, UnsupportedError, no_such, shown
from softless.mechanisms import resolve
from softless.mechanisms.scored import check_count
from softless.models.shipped import shipped_names
from softless.models.table import CONFIGS, Config

MOST = {"dims": 2**20, "depths": 10_000, "heads": 2**20}
MOST_PIXELS = 2**16  # along a side
DOUBLING = ("swin", "cswin")  # families in which patch merging doubles the channels


def reshaped(
    config: Config, patch_size: object = None, dims: object = None, depths: object = None, heads: object = None
) -> Config:
    """Return the configuration with other sizes. None keeps a size, and a single number is for a single stage.

    A model may have fewer stages than its name says, because a small picture has only one token left before the last.
    """
    stages = {
        "dims": config.dims if dims is None else _stages("dims", dims, config),
        "depths": config.depths if depths is None else _stages("depths", depths, config),
        "heads": config.heads if heads is None else _stages("heads", heads, config),
    }
    if len({len(numbers) for numbers in stages.values()}) > 1:
        sizes = ", ".join(f"{name} {list(numbers)}" for name, numbers in stages.items())
        raise ArgumentError(f"{sizes} must have a number each for every stage")
    for dim, count in zip(stages["dims"], stages["heads"], strict=True):
        if dim % count:
            raise ArgumentError(f"dims {list(stages['dims'])} are not multiples of heads {list(stages['heads'])}")
    if config.family in DOUBLING and any(b != 2 * a for a, b in zip(stages["dims"], stages["dims"][1:], strict=False)):
        raise ArgumentError(f"dims {list(stages['dims'])} must double from stage to stage in {config.family}")
    mixed = [
        new if count == old else min(count, new)
        for count, old, new in zip(config.mixed, config.depths, stages["depths"], strict=False)
    ]
    patch = config.patch if patch_size is None else patch_size
    check_count("patch_size", patch, most=MOST_PIXELS)
    return replace(config, patch=patch, mixed=tuple(mixed), **stages)  # type: ignore[arg-type]


def _stages(name: str, value: object, config: Config) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    most = len(config.depths)
    if not (0 < len(numbers) <= most and all(type(number) is int and number > 0 for number in numbers)):
        needed = "a positive number" if most == 1 else f"1 to {most} positive numbers, one per stage"
        raise ArgumentError(f"{name} {shown(value)} must be {needed}, for {config.family}")
    if max(numbers) > MOST[name]:
        raise ArgumentError(f"{name} {shown(value)} must be at most {MOST[name]:,}")
    return numbers


def customize(
    name: str,
    mechanism: object = None,
    local: bool | None = None,
    window: object = None,
    pattern: object = None,
    img_size: object = None,
    *,
    qk_conv: bool | None = None,
    **sizes: object,
) -> Config:
    """Return the named configuration with these changes. A change that would have no effect raises."""
    if not isinstance(name, str) or name not in CONFIGS:
        raise ArgumentError(no_such("model", name, [*CONFIGS, *shipped_names()]))
    for option, value in (("local", local), ("qk_conv", qk_conv)):
        if not (value is None or isinstance(value, bool)):
            raise ArgumentError(f"{option} is {shown(value)} and must be True, False or None")
    config = reshaped(CONFIGS[name], **sizes)
    mixed = config.mixed if pattern is None else _mixed(pattern, config.depths)
    changes = {"mechanism": mechanism, "local": local, "window": window, "qk_conv": qk_conv}
    names = [name for name, value in changes.items() if value is not None]
    if names and not any(mixed):
        raise ArgumentError(
            f"{' and '.join(names)} would change no block of model '{name}', whose own softmax attention is in all: "
            f"give a pattern such as {'I' * len(mixed)!r}"
        )
    return replace(
        config,
        mixed=mixed,
        mechanism=resolve(config.mechanism if mechanism is None else mechanism),
        local=config.local if local is None else local,
        qk_conv=config.qk_conv if qk_conv is None else qk_conv,
        windows=() if window is None else _windows(window, config, mixed),
        img_size=config.img_size if img_size is None else _sides(img_size),
    )


def _mixed(pattern: object, depths: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the first blocks of each stage take the mechanism."""
    letters = list(pattern) if isinstance(pattern, str | list | tuple) else []
    counts = [
        {"I": depth, "S": 0}.get(str(letter), int(letter) if str(letter).isdecimal() else -1)
        for letter, depth in zip(letters, depths, strict=False)
    ]
    if len(letters) != len(depths) or not all(0 <= count <= depth for count, depth in zip(counts, depths, strict=True)):
        raise ArgumentError(
            f"pattern {shown(pattern)} must have an I, an S or a number of blocks for each stage, of {list(depths)} "
            f"blocks"
        )
    return tuple(counts)


def _windows(window: Any, config: Config, mixed: tuple[int, ...]) -> tuple[int | None, ...]:
    if config.family == "deit":
        raise UnsupportedError(f"window {shown(window)} cuts a picture, and DeiT has a class token beside it")
    sides = tuple(window) if isinstance(window, list | tuple) else (window,) * len(config.depths)
    if len(sides) != len(config.depths) or not all(side is None or (type(side) is int and side > 0) for side in sides):
        raise ArgumentError(
            f"window {shown(window)} must be a positive number, or {len(config.depths)} of them or None"
        )
    idle = [stage for stage, (side, blocks) in enumerate(zip(sides, mixed, strict=True)) if side and not blocks]
    if idle and isinstance(window, list | tuple):
        raise ArgumentError(
            f"window {window!r} would change no block of stage {idle[0] + 1}, whose attention is the family's own: "
            f"give None there"
        )
    return sides


def _sides(img_size: object) -> tuple[int, int]:
    sides = tuple(img_size) if isinstance(img_size, list | tuple) else (img_size, img_size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= MOST_PIXELS for side in sides):
        raise ArgumentError(
            f"img_size {shown(img_size)} must be a positive number, or (height, width), of at most {MOST_PIXELS:,}"
        )
    return sides[0], sides[1]
