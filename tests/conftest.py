"""Every test gets a seed of its own, no network, and shapes that are checked against their annotations."""

import gc
import os
import random
import socket
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.annotations import checked_at_first, same_shapes
from tests.variants import ALWAYS, WITH_EXAMPLES

# The hook rewrites what it checks as it is imported, so it must be installed before any test module loads.
# The front door is left out: a wrong type comes from the user there, and softless reports it with an error of its own.
CHECK_TYPES = os.environ.get("SOFTLESS_TYPECHECK", "1") != "0" and find_spec("beartype") is not None
if CHECK_TYPES:
    from jaxtyping import install_import_hook

    CHECKED = ["softless.algebra", "softless.nn", "softless.probes", "softless.data.device_augment"]
    install_import_hook(CHECKED, "beartype.beartype")

# too_slow measures the machine, not the test.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("test", derandomize=True, max_examples=25, **COMMON)
settings.register_profile("slow", max_examples=200, print_blob=True, **COMMON)
settings.register_profile("mutants", parent=settings.get_profile("test"), max_examples=5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

MOST_CASES = 24
HAS_CUDA = torch.cuda.is_available()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files without a `compile` test when only those tests run."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("compile"):
        return "mark.compile" not in collection_path.read_text() or None
    return None


def shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """Shuffle the files, and the tests within each file, so that fixtures of a module are still made once."""
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    draw.shuffle(files)
    for tests in files:
        draw.shuffle(tests)
    items[:] = chain.from_iterable(files)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        waits = getattr(parameters(item).get("case"), "waits", None)
        many_examples = getattr(item.obj, "is_hypothesis_test", False)
        if (waits == ALWAYS and not item.get_closest_marker("compile")) or (waits == WITH_EXAMPLES and many_examples):
            item.add_marker(pytest.mark.slow)
    if settings.get_current_profile_name() == "test":
        keep_some(items)
    mark_options(items)
    if "SOFTLESS_SHUFFLE" in os.environ:
        shuffle(items, random.Random(os.environ["SOFTLESS_SHUFFLE"]))
    if CHECK_TYPES:
        skip = pytest.mark.skip(reason="torch.compile cannot trace the checked functions: set SOFTLESS_TYPECHECK=0")
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported and collected: it stays until the end."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the garbage collector free everything in order."""
    gc.unfreeze()


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def keep_some(items: list[pytest.Item]) -> None:
    """Let a test of more than MOST_CASES cases try that many of them, and the rest wait for `make slow`.

    Which ones is drawn by their names, so each test draws others, and a case is tried by some test of many. A new case
    changes nothing for the cases before it, or takes the place of one. A module with `EVERY_CASE = True` tries all.
    """
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if not (item.get_closest_marker("slow") or getattr(item.module, "EVERY_CASE", False)):
            tests.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for cases in tests.values():
        for item in sorted(cases, key=lambda each: zlib.crc32(each.nodeid.encode()))[MOST_CASES:]:
            item.add_marker(pytest.mark.slow)


def mark_options(items: list[pytest.Item]) -> None:
    """Reduce the examples of a law for all but the first case of each mechanism, from 25 to 5.

    In Triton's interpreter they are reduced from 8 to 3. The tests of a module with `ONE_LAW = True` count as one law.
    """
    tried = set()
    for item in items:
        params = parameters(item)
        if "case" in params and getattr(item.obj, "is_hypothesis_test", False):
            mechanism = getattr(params["case"], "name", str(params["case"]).split("-")[0])
            test = item.path if getattr(item.module, "ONE_LAW", False) else item.obj
            law = (test, str(params | {"case": mechanism}))
            item.is_law, item.tries_few = True, law in tried
            tried.add(law)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Check annotations in one test of three, and in the first example of a law: thousands call the same functions."""
    if settings.get_current_profile_name() != "test":
        return (yield)
    if not getattr(item, "is_law", False):
        with nullcontext() if zlib.crc32(item.nodeid.encode()) % 3 == 0 else same_shapes():
            return (yield)
    law, chosen = item.obj.hypothesis, item.obj._hypothesis_internal_use_settings
    if item.tries_few:
        chosen = settings(chosen, max_examples=max(3, chosen.max_examples // 5))
    with (
        patch.object(item.obj, "_hypothesis_internal_use_settings", chosen),
        patch.object(law, "inner_test", checked_at_first(law.inner_test)),
    ):
        return (yield)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch with a number that differs between tests and is the same in every run."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.default_generator.manual_seed(value)  # torch.manual_seed notes where it was called from, for devices to come
    if HAS_CUDA:
        torch.cuda.manual_seed_all(value)
    return value


@pytest.fixture(autouse=True)
def no_route_of_an_earlier_test() -> None:
    """Tests replace what routes depend on, such as the devices whose evidence is recorded."""
    from softless import routes

    routes.forget()


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Make connections raise. Unix sockets stay open, because multiprocessing uses them."""

    def guard(name: str):
        real = getattr(socket.socket, name)

        def connect(self: socket.socket, address: object):
            if self.family != socket.AF_UNIX:
                raise RuntimeError(f"a test tried to reach {address}, and tests run without a network")
            return real(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guard(name))
        yield
