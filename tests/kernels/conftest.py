"""Tests marked `kernels` run Triton's interpreter, which is chosen when triton is imported: a process of their own."""

import os
from collections.abc import Callable, Iterator, Sequence

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    skip = pytest.mark.skip(reason="kernels run here only in Triton's interpreter: set TRITON_INTERPRET=1")
    for item in items:
        if item.get_closest_marker("kernels"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once() -> Iterator[None]:
    """At every call of a function of a kernel the interpreter searches its language for what to replace by numpy.

    That is most of its time, and inside a launch nothing is left to find.
    """
    if not INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    search = interpreter._patch_lang

    def search_once(function: Callable) -> object:
        known = [each for each in function.__globals__.values() if each is language or each is language.core]
        return search(function) if any(language.core.is_builtin(each.load) for each in known) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", search_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def types_made_once() -> Iterator[None]:
    """At every operation the interpreter makes the same few types of blocks anew, and a table of numpy's types."""
    if not INTERPRETED:
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, {}
    make, made = core.block_type.__init__, {}

    def find_once(kind: core.dtype) -> object:
        scalar = kind.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    def make_once(self: core.block_type, element_ty: core.dtype, shape: Sequence) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = vars(self)
        vars(self).update(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", find_once)
        patch.setattr(core.block_type, "__init__", make_once)
        yield


@pytest.fixture(autouse=True)
def no_plan_of_an_earlier_test() -> None:
    """Tests change how work is cut, and a plan that was made before would not notice."""
    if INTERPRETED:
        from softless.kernels.common import plan

        plan.forget()
