"""What is built is what was written: the wheel works in an empty environment, the sdist holds the whole project."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    return next(dist.glob("*.whl"))


def test_wheel_installs_and_imports_where_nothing_else_is_installed(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert run(python, "-c", "import softless; print(softless.__version__)", cwd=tmp_path) == VERSION
    assert (tmp_path / "venv/bin/softless").exists()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    kept = [*(ROOT / "softless").rglob("*.py"), *(ROOT / "softless/study/page/static").iterdir()]
    kept += (ROOT / "softless/weights").glob("*.safetensors")
    sources = {str(path.relative_to(ROOT)) for path in kept}
    assert sources | {"softless/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"softless", f"softless-{VERSION}.dist-info"}
    assert f"softless-{VERSION}.dist-info/licenses/LICENSE" in names


def test_weights_that_are_added_to_the_tree_ship(tmp_path):
    tree, weights = tmp_path / "tree", "softless/weights/tiny.safetensors"
    for name in ("softless", "recipes"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / weights).parent.mkdir(exist_ok=True)
    (tree / weights).write_bytes(b"weights")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, tree, cwd=tmp_path)
    assert weights in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        assert f"softless-{VERSION}/{weights}" in archive.getnames()


def test_sdist_holds_everything_needed_to_test_and_document(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "mkdocs.yml", "softless/py.typed"}
    assert needed <= names
    for folder in ("tests", "docs"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")}
        assert files <= names
