"""Load the scripts of benchmarks/, which find each other by name.

Folders of tests have the same names (gpu, language). So scripts are in `sys.modules` only while one is loaded.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = [path.stem for path in BENCHMARKS.glob("*.py")]
LOADED: dict[str, ModuleType] = {}


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        for each in NAMES:
            patch.delitem(sys.modules, each, raising=False)
        sys.modules.update(LOADED)
        try:
            return importlib.import_module(name)
        finally:
            LOADED.update({each: sys.modules.pop(each) for each in NAMES if each in sys.modules})
