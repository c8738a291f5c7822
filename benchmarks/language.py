"""Keep the numbers of a language model, and print them as docs/language.md shows them.

    python benchmarks/language.py runs/text-small    # writes benchmarks/results/text-small.json, and prints the table

The file is named after the folder of the run.
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SCHEMA = "softless.language/1"


def keep(folder: Path) -> dict[str, Any]:
    """Collect the settings, the curve and the result of a finished run."""
    about, result = (json.loads((folder / name).read_text()) for name in ("run.json", "result.json"))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    settings = {"data": Path(about["data"]).name} | {
        key: about[key] for key in ("recipe", "bytes", "fingerprint", "seed")
    }
    del result["answers"]
    return {"schema": SCHEMA, **settings, "evaluations": [line for line in lines if "epoch" in line], **result}


def table(run: dict[str, Any]) -> str:
    """Return a row per evaluation, and a sentence about time and speed."""
    rows = ["| epoch | update | loss per token | bits per byte | perplexity |", "|---|---|---|---|---|"]
    for line in run["evaluations"]:
        scores = f"{line['test_loss']:.4f} | {line['bits_per_byte']:.4f} | {line['perplexity']:.3f}"
        rows.append(f"| {line['epoch']} | {line['step']} | {scores} |")
    recipe, machine = run["recipe"], run["machine"]
    tokens = run["steps"] * recipe["batch"] * recipe["length"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    took = f"{run['seconds']:.0f} s for {tokens / 1e6:.2f} million tokens ({tokens / run['seconds']:,.0f} tokens/s)"
    busy = f"with {machine['load_average']:.1f} processes running at its end"
    speed = f"The training took {took} with {threads} on {machine['processor']}, {busy}."
    return "\n".join([*rows, "", speed])


def main() -> None:
    folder = Path(sys.argv[1])
    run = keep(folder)
    (RESULTS / f"{folder.name}.json").write_text(json.dumps(run, indent=1) + "\n")
    print(table(run))


if __name__ == "__main__":
    main()
