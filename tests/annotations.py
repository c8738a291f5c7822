"""Shapes are checked against their annotations as functions are called; here that can wait."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from jaxtyping import config


@contextmanager
def same_shapes() -> Iterator[None]:
    """Inside, annotations are not checked again."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)


def checked_at_first(law: Callable[..., None]) -> Callable[..., None]:
    """The law, its first example with annotations checked: checking takes as long as all else, and tells no number."""
    tried = itertools.count()

    @functools.wraps(law)
    def run(*args: object, **kwargs: object) -> None:
        with nullcontext() if next(tried) == 0 else same_shapes():
            law(*args, **kwargs)

    return run
