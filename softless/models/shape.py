"""A model of another size: the same family with other patches, widths, depths or heads.

>>> from softless.models.shape import reshaped
>>> from softless.models.table import CONFIGS
>>> small = reshaped(CONFIGS["inline_deit_tiny"], patch_size=2, dims=64, depths=4, heads=2)
>>> small.patch, small.dims, small.depths, small.mixed
(2, (64,), (4,), (4,))
"""

from dataclasses import replace

from softless.errors import ArgumentError, shown
from softless.models.table import Config

MOST = {"dims": 2**20, "depths": 10_000, "heads": 2**20}
MOST_PIXELS = 2**16  # along a side
DOUBLING = ("swin", "cswin")  # patch merging makes two channels of four


def reshaped(
    config: Config, patch_size: object = None, dims: object = None, depths: object = None, heads: object = None
) -> Config:
    """The configuration with these sizes; None keeps its own, and a number is that of a single stage.

    Fewer stages than the name's are its first ones: small pictures would be a point before the last.
    """
    stages = {
        "dims": config.dims if dims is None else _stages("dims", dims, config),
        "depths": config.depths if depths is None else _stages("depths", depths, config),
        "heads": config.heads if heads is None else _stages("heads", heads, config),
    }
    if len({len(numbers) for numbers in stages.values()}) > 1:
        given = ", ".join(f"{name} {list(numbers)}" for name, numbers in stages.items())
        raise ArgumentError(f"{given} must have a number each for every stage")
    for dim, count in zip(stages["dims"], stages["heads"], strict=True):
        if dim % count:
            raise ArgumentError(f"dims {list(stages['dims'])} are not multiples of heads {list(stages['heads'])}")
    if config.family in DOUBLING and any(b != 2 * a for a, b in zip(stages["dims"], stages["dims"][1:], strict=False)):
        raise ArgumentError(f"dims {list(stages['dims'])} must double from stage to stage in {config.family}")
    mixed = [
        new if some == old else min(some, new)
        for some, old, new in zip(config.mixed, config.depths, stages["depths"], strict=False)
    ]
    return replace(config, patch=_patch(patch_size, config), mixed=tuple(mixed), **stages)  # type: ignore[arg-type]


def _patch(patch_size: object, config: Config) -> int:
    if patch_size is None:
        return config.patch
    if type(patch_size) is not int or not 1 <= patch_size <= MOST_PIXELS:
        raise ArgumentError(
            f"patch_size {shown(patch_size)} must be a whole number, at least 1 and at most {MOST_PIXELS:,}"
        )
    return patch_size


def _stages(name: str, given: object, config: Config) -> tuple[int, ...]:
    numbers = tuple(given) if isinstance(given, list | tuple) else (given,)
    most = len(config.depths)
    if not (0 < len(numbers) <= most and all(type(number) is int and number > 0 for number in numbers)):
        needed = "a positive number" if most == 1 else f"1 to {most} positive numbers, one a stage"
        raise ArgumentError(f"{name} {shown(given)} must be {needed}, for {config.family}")
    if max(numbers) > MOST[name]:
        raise ArgumentError(f"{name} {shown(given)} must be at most {MOST[name]:,}")
    return numbers
