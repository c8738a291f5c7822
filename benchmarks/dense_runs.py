"""The runs of benchmarks/dense_results.py: classifiers, and backbones in their heads that begin with a classifier.

packed_runs.py says how they share a device, and which files they have. PART is pretrain, camvid or bccd.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import packed_runs
from dense_page import METRICS, PAIRS
from packed_runs import PackedRun, Record

from softless.report.units import counted, listed
from softless.train.run import Run

SEEDS = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Training(PackedRun):
    """A run of softless train and, unless it is a classifier's, the test of its best weights."""

    backbone: str
    head: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.backbone, self.head, str(self.seed))))

    @property
    def tested(self) -> Path:
        return self.run.folder / "test.json"

    @property
    def classifier(self) -> Run | None:
        """The run whose backbone this one begins with."""
        return None if self.part == "pretrain" else Run(self.out / "pretrain" / f"{self.backbone}-0")

    @property
    def waits(self) -> bool:
        """Whether the classifier is not trained yet."""
        return self.classifier is not None and not self.classifier.result.exists()

    @property
    def over(self) -> bool:
        return self.classifier is None or self.tested.exists()

    def about(self) -> Record:
        return {"name": self.name, "backbone": self.backbone, "head": self.head, "seed": self.seed}

    def outcome(self, together: int) -> Record:
        result, begun = json.loads(self.run.result.read_bytes()), self.run.read()
        best = next(value for key, value in result.items() if key.startswith("best_") and key != "best_step")
        record = {
            "best": best, "together": together, "images": begun["images"],
            "recipe": {key: begun["recipe"][key] for key in ("epochs", "batch", "precision")},
            **{key: result[key] for key in ("steps", "best_step", "seconds", "versions", "machine")},
        }  # fmt: skip
        if self.classifier is None:
            return record
        taught = json.loads(self.classifier.result.read_bytes())
        return record | {"classifier": taught["best_top1"], "test": json.loads(self.tested.read_bytes())}

    def told(self, record: Record) -> str:
        test = f", test {record['test']['numbers'][METRICS[self.part][0]]:.2%}" if "test" in record else ""
        return f"best {record['best']:.2%}{test}, {record['seconds']:.0f} s"


def trainings(out: Path, part: str, seeds: Sequence[int] = SEEDS) -> list[Training]:
    """Return the runs of a part, seed by seed, so that a call that is stopped leaves whole seeds."""
    return [
        Training(out=out, part=part, backbone=backbone, head=head, seed=seed)
        for seed in seeds
        for backbone, head in PAIRS[part]
    ]


def run_packed(
    wanted: Sequence[Training], words: Callable[[Training], list[str]], *, pack: int, minutes: float | None = None
) -> int:
    """Work on the runs whose classifiers are trained, and return how many are left, those of the others included."""
    early = [training for training in wanted if training.waits and not training.record.exists()]
    if early:
        names = listed([*dict.fromkeys(training.backbone for training in early)])
        print(f"{counted(len(early), 'run')} need classifiers of {names}: run pretrain", flush=True)
    ready = [training for training in wanted if not training.waits]
    return packed_runs.run_packed(ready, words, pack=pack, minutes=minutes) + len(early)
