"""The laws of the house: how long a file may be, what it may contain, and what importing softless costs."""

import ast
import inspect
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import softless
from softless.mechanisms import OPTIONS

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "softless").rglob("*.py"))

HEAVY = ("torch", "triton", "timm", "transformers", "numpy", "typer", "rich")

ALGEBRA_MAY_IMPORT = {"torch", "jaxtyping"} | sys.stdlib_module_names
IO_IS_OPEN_TO = ("io", "data", "train", "models", "study", "conversion", "commands", "__init__")

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "os.system"}

REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|conda\.anaconda\.org|--(extra-)?index-url")
MACHINE_PATHS = re.compile(r"(?<![\w.:/~-])/(home|root|Users|work|opt|mnt|srv|private)/\w")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def place(path: Path) -> str:
    """The part of the house a source file is in: `algebra` for softless/algebra/state.py."""
    return path.relative_to(ROOT / "softless").with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def kept_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_is_longer_than_a_reader_can_hold():
    caps = {path: 400 if place(path) == "kernels" else 300 for path in SOURCES}
    assert {str(path): lines(path) for path, cap in caps.items() if lines(path) > cap} == {}


def test_no_class_name_is_defined_in_two_modules():
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_study_reaches_its_page_through_at_most_25_files():
    rooms = [path for path in SOURCES if place(path) in ("study", "report")]
    of_text = [path for path in rooms if path.parent.name == "text"]
    assert len([ROOT / "softless/commands/study.py", *rooms]) - len(of_text) <= 25
    assert len([ROOT / "softless/commands/study_text.py", *of_text]) <= 15


def test_importing_softless_imports_nothing_heavy():
    code = f"import sys, softless; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in softless.__all__ if not name.startswith("__")])
def test_every_public_name_is_documented(name):
    thing = getattr(softless, name)
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else getattr(thing, "__doc__", None)
    assert text, f"softless.{name} has no docstring"


def test_the_docstring_of_mechanism_lists_every_option_with_its_default():
    listed: dict[str, dict[str, str]] = {}
    for line in inspect.getdoc(softless.mechanism).splitlines():
        if name := re.match(r"(\w+) {2,}", line):
            options = listed.setdefault(name[1], {})
        if line.startswith(" ") or name:
            options |= re.findall(r'(\w+)=("[^"]*"|\([^)]*\)|[\w.]+)(?=[:,])', line)
    for name, options in OPTIONS.items():
        expected = {option: default for option, default in options.items() if option != "sim"}
        assert {option: ast.literal_eval(value) for option, value in listed.get(name, {}).items()} == expected, name


def test_algebra_imports_torch_and_nothing_else():
    strangers = {
        f"{path.name}: {name}"
        for path in SOURCES
        if place(path) == "algebra"
        for name in imported(path)
        if name.split(".")[0] not in ALGEBRA_MAY_IMPORT and not name.startswith(("softless.algebra", "softless.errors"))
    }
    assert strangers == set()


def test_io_is_open_to_those_who_read_files_and_to_no_one_else():
    visitors = {
        str(path)
        for path in SOURCES
        if place(path) not in IO_IS_OPEN_TO and any(f"{name}.".startswith("softless.io.") for name in imported(path))
    }
    assert visitors == set()


def test_nothing_unpickles_or_evaluates():
    offences = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in {name.split(".")[0] for name in imported(path)} & UNSAFE_MODULES | called(path) & UNSAFE_CALLS
    }
    assert offences == set()


def test_only_io_calls_torch_load_and_with_weights_only():
    calls = [
        (place(path), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("weights_only"))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-2:] == ["torch", "load"]
    ]
    assert calls == [("io", "True")]
    assert not any(name == "torch.load" for path in SOURCES for name in imported(path))


def test_only_commands_print():
    speakers = {str(path) for path in SOURCES if place(path) not in ("commands", "cli") and "print" in called(path)}
    assert speakers == set()


def test_no_file_names_a_registry_or_a_machine():
    found = set()
    for path in kept_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        matches = [*REGISTRIES.finditer(text), *MACHINE_PATHS.finditer(text)]
        found |= {f"{path.relative_to(ROOT)}: {match[0]}" for match in matches}
    assert found == set()


def test_every_decision_is_listed():
    folder = ROOT / "docs/adr"
    index = (folder / "index.md").read_text()
    assert [
        path.name for path in folder.glob("*.md") if path.name != "index.md" and f"({path.name})" not in index
    ] == []


def test_tests_run_without_a_network():
    with socket.socket() as client, pytest.raises(RuntimeError, match="without a network"):
        client.connect(("127.0.0.1", 9))


def test_unix_sockets_still_work(tmp_path):
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(address)
        server.listen()
        client.connect(address)


def test_every_test_starts_from_its_own_seed(seed):
    assert torch.initial_seed() == seed


@pytest.mark.skipif(os.environ.get("SOFTLESS_TYPECHECK") == "0", reason="turned off")
def test_shapes_are_checked_while_tests_run():
    assert any(type(finder).__module__.startswith("jaxtyping") for finder in sys.meta_path)
