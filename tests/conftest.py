"""What every test can rely on: a seed, no network, and shapes checked against their annotations."""

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

# The hook rewrites what it checks as it is imported, so it must be installed before any test module loads.
# The front door is left out: there a wrong type is the user's, and softless answers it in its own words.
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

HAS_CUDA = torch.cuda.is_available()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


# Options of mechanisms that run with their defaults at every change: these wait for make slow.
VARIANTS = {"performer-hyperbolic", "cosformer", "decay-retention", "transnormer-t1", "diagonal-t1"}
VARIANTS |= {"performer features=3 kind=hyperbolic", "decay slopes=retention factor=0.5", "transnormer variant=t1"}
VARIANTS |= {"diagonal variant=t1 block=16", "sparse-fixed", "nonlocal-concatenation", "nonlocal pairing=concatenation"}
VARIANTS |= {f"sparse pattern={rest}" for rest in ("local stride=5", "strided stride=4", "fixed stride=6 summary=2")}
VARIANTS |= {"linformer rank=4 length=257 share=none", "nonlocal-dot", "agent", "asymmetric_nonlocal"}
VARIANTS |= {"inline-elu", "inline-elu-exp", "linear-elu-exp", "linear-softmax", "threshold-mean", "taylor-2-unit"}
# Of these, the tests with many examples wait: topk, sparse and nystrom, which work alike, have theirs at every change.
ALIKE = {"longformer", "soft", "nonlocal pairing=dot", "agent agents=5", "asymmetric_nonlocal pyramid=(1, 3, 6)"}
ALIKE |= {"longformer window=4 global_tokens=2", "soft landmarks=4"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the tests marked `compile` alone imports no file that has none."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("compile"):
        return "mark.compile" not in collection_path.read_text() or None
    return None


def shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """Files in random order, and the tests of each: what a file makes once is still made once."""
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    draw.shuffle(files)
    for tests in files:
        draw.shuffle(tests)
    items[:] = chain.from_iterable(files)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        case = str(getattr(item, "callspec", None) and item.callspec.params.get("case"))
        later = case in VARIANTS and not item.get_closest_marker("compile")
        if later or (case in ALIKE and getattr(item.obj, "is_hypothesis_test", False)):
            item.add_marker(pytest.mark.slow)
    mark_options(items)
    if "SOFTLESS_SHUFFLE" in os.environ:
        shuffle(items, random.Random(os.environ["SOFTLESS_SHUFFLE"]))
    if CHECK_TYPES:
        skip = pytest.mark.skip(reason="torch.compile cannot trace the checked functions: set SOFTLESS_TYPECHECK=0")
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not search it again and again."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """So that it is freed in order."""
    gc.unfreeze()


# Laws that a whole file of tests is about: those on neighbors and on streams.
TOLD_IN_PARTS = {"test_neighbors.py", "test_streaming.py"}


def mark_options(items: list[pytest.Item]) -> None:
    """A law is tried on 25 examples of a mechanism, which its first case gets; each further option or part on 5.

    In Triton's interpreter on 8, and each further option on 3.
    """
    tried = set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "case" in params and getattr(item.obj, "is_hypothesis_test", False):
            mechanism = getattr(params["case"], "name", str(params["case"]).split("-")[0])
            told = item.path if item.path.name in TOLD_IN_PARTS else item.obj
            law = (told, str(params | {"case": mechanism}))
            item.is_law, item.tries_few = True, law in tried
            tried.add(law)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """At every change one test in three checks annotations, and laws do at first: thousands call the same functions."""
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
    """A different seed for every test, the same in every run."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.default_generator.manual_seed(value)  # torch.manual_seed notes where it was called from, for devices to come
    if HAS_CUDA:
        torch.cuda.manual_seed_all(value)
    return value


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Connections raise. Unix sockets stay open: multiprocessing speaks through them."""

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
