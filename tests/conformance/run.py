"""timm's own tests of its models, from its sdist, on ours: make timm-conformance.

The sdist of the installed timm is downloaded once, into build/. Arguments go to pytest.
"""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sdist() -> Path:
    """The unpacked sdist of the installed timm."""
    folder, name = ROOT / "build" / "timm", f"timm-{version('timm')}"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm"]
        subprocess.run([*pip, "--dest", folder, name.replace("-", "==")], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name


def main(arguments: list[str]) -> int:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-p", "our_names", "tests/test_models.py", *arguments]
    return subprocess.run(command, cwd=sdist(), env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
