"""Can the tests fail? Break the code in one place at a time and see whether they notice (R26).

    python tests/meta/mutants.py [--sample 150] [--seed 0] [--jobs 2]

A mutant differs from the package in one operator, comparison, constant or condition. It is killed if the laws,
gradients or front-door tests fail or hang on it. At least 90 % must be killed; survivors are listed with their line.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGETS = ("softless/algebra", "softless/functional.py", "softless/io")
SUITES = (
    "tests/laws",
    "tests/front_door",
    "tests/io",
    "tests/numerics/test_gradients.py",
    "tests/numerics/test_finite.py",
)
ENOUGH = 0.9
HANG = 600  # seconds
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.MatMult: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.USub: ast.UAdd,
    ast.Invert: ast.UAdd,
}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    change: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Every single-point change of a file. Texts, annotations, imports and assertions are left alone."""
    tree = ast.parse(path.read_text())
    for index, node in enumerate(code(tree)):
        for change in changes(node):
            broken = copy.deepcopy(tree)
            target = list(code(broken))[index]
            change.apply(target)
            yield Mutant(str(path.relative_to(ROOT)), change.line, change.says, ast.unparse(broken))


@dataclass(frozen=True)
class Change:
    field: str
    value: object
    line: int
    says: str

    def apply(self, node: ast.AST) -> None:
        setattr(node, self.field, self.value)


def changes(node: ast.AST) -> Iterator[Change]:
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp) and type(node.op) in SWAPS:
        new = SWAPS[type(node.op)]
        yield Change("op", new(), line, f"{ast.unparse(node)}: {type(node.op).__name__} -> {new.__name__}")
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = SWAPS[type(node.ops[0])]
        yield Change("ops", [new()], line, f"{ast.unparse(node)}: {type(node.ops[0]).__name__} -> {new.__name__}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield Change("value", not node.value, line, f"{node.value} -> {not node.value}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield Change("value", node.value + 1, line, f"{node.value} -> {node.value + 1}")
    elif isinstance(node, ast.IfExp):
        yield Change("test", ast.UnaryOp(ast.Not(), node.test), line, f"not ({ast.unparse(node.test)})")


def code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute something, in a fixed order."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(
                child, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom
            ):
                yield child
                yield from code(child)


def survives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("softless", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "docs"):
            Path(folder, name).symlink_to(ROOT / name)
        Path(folder, mutant.path).write_text(mutant.source)
        environment = os.environ | {
            "PYTHONPATH": folder,
            "OMP_NUM_THREADS": "1",
            "SOFTLESS_TYPECHECK": "0",
            "HYPOTHESIS_PROFILE": "mutants",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not compile",
        ]
        own_first = sorted(SUITES, key=lambda suite: Path(suite).name != Path(mutant.path).parent.name)
        try:
            done = subprocess.run(
                [*command, *own_first], cwd=folder, env=environment, capture_output=True, timeout=HANG, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="try this many, drawn at random; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    files = [path for target in TARGETS for path in sorted(_files(ROOT / target))]
    every = [mutant for path in files for mutant in mutants(path)]
    tried = every
    if arguments.sample and arguments.sample < len(every):
        tried = random.Random(arguments.seed).sample(every, arguments.sample)
    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for count, (mutant, alive) in enumerate(zip(tried, pool.map(survives, tried), strict=True), 1):
            if alive:
                survivors.append(mutant)
            print(f"{count}/{len(tried)} {'SURVIVED' if alive else 'killed'}  {mutant}", flush=True)
    killed = 1 - len(survivors) / len(tried)
    print(f"{killed:.1%} of {len(tried)} mutants killed, of {len(every)} there are; at least {ENOUGH:.0%} are needed")
    for mutant in survivors:
        print(f"  survived  {mutant}")
    return int(killed < ENOUGH)


def _files(target: Path) -> list[Path]:
    return list(target.rglob("*.py")) if target.is_dir() else [target] if target.exists() else []


if __name__ == "__main__":
    sys.exit(main())
