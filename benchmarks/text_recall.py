"""Recall by length of all twins of a text: the table of docs/study-text.md.

    python benchmarks/text_recall.py --seeds 1 [--twins softmax,delta,linear] [--updates 300]

It trains what `softless study --text` trains, a model of one block per twin, on a CPU with one thread.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from softless.study.text.plan import RecallPlan
from softless.study.text.recall import RecallRun
from softless.study.text.twins import TEXT_TWINS, text_twins_named
from softless.study.workers import execute
from softless.train.assemble import Runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--twins", default=",".join(twin.id for twin in TEXT_TWINS))
    parser.add_argument("--updates", type=int, default=RecallPlan().updates)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = replace(RecallPlan(), updates=args.updates)
    lengths = [4 * pairs for pairs in (*plan.inside, *plan.beyond)]
    print(f"| twin | task | {' | '.join(f'{length} tokens' for length in lengths)} |")
    print(f"|{'---|' * (len(lengths) + 2)}")
    for twin in text_twins_named(args.twins.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                RecallRun(out=Path(folder), twin=twin, seed=seed, runtime=Runtime(device="cpu"), plan=plan)
                for seed in range(args.seeds)
            ]
            records = [execute(run, None) for run in runs]
        for task in ("recall", "induction"):
            shares = [
                [
                    point["accuracy"]
                    for record in records
                    for point in record["points"]
                    if (point["task"], point["tokens"]) == (task, length)
                ]
                for length in lengths
            ]
            print(f"| {twin.label} | {task} | {' | '.join(f'{fmean(share):.1%}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
