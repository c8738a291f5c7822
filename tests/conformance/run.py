"""timm's own tests of its models, from its sdist, on ours: make timm-conformance.

The sdist of the installed timm is downloaded once, into build/; `--fetch` does only that. Other arguments go to pytest.
"""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = f"timm-{version('timm')}"
SDIST = ROOT / "build" / "timm" / NAME


def fetch() -> int:
    """Have the sdist of the installed timm, unpacked."""
    if SDIST.exists():
        return 0
    folder = SDIST.parent
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps", "--no-binary", "timm"]
    if failed := subprocess.run([*pip, "--dest", folder, NAME.replace("-", "==")], check=False).returncode:
        return failed
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return 0


def main(arguments: list[str]) -> int:
    if (failed := fetch()) or arguments == ["--fetch"]:
        return failed
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-p", "our_names", "tests/test_models.py", *arguments]
    return subprocess.run(command, cwd=SDIST, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
