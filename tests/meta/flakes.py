"""Do the tests always say the same? Run the suite again and again in random order (R27).

    python tests/meta/flakes.py [--runs 20] [--first 0] [--jobs 2]

Exit status 1 if any test had two outcomes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def outcomes(order: int, jobs: int) -> dict[str, str]:
    """What each test said when the suite ran in this order; what failed is told at once."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal", f"--junitxml={report}"]
        environment = os.environ | {"SOFTLESS_SHUFFLE": str(order), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "-m", "not slow and not gpu and not compile and not kernels"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            check=False,
        )
        said = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            found = [child for child in case if child.tag in ("failure", "error", "skipped")]
            said[name] = found[0].tag if found else "passed"
            if said[name] in ("failure", "error"):
                print(f"  {said[name]}  {name}: {' '.join((found[0].get('message') or '').split())[:500]}", flush=True)
        return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first order: runs may be spread over days")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    seen: dict[str, set[str]] = defaultdict(set)
    for order in range(arguments.first, arguments.first + arguments.runs):
        for test, outcome in outcomes(order, arguments.jobs).items():
            seen[test].add(outcome)
        flaky = [test for test, said in seen.items() if len(said) > 1]
        failing = sum("passed" not in said and "skipped" not in said for said in seen.values())
        print(f"order {order}: {len(seen)} tests, {failing} fail, {len(flaky)} flaky", flush=True)
    for test in flaky:
        print(f"  flaky  {test}: {', '.join(sorted(seen[test]))}")
    return int(bool(flaky))


if __name__ == "__main__":
    sys.exit(main())
