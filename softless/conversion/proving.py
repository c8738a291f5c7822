"""What comes after the choice: heal if that is wanted, prove, and compare what both models generate.

The part of the data that proves is looked at once for the model that is handed out. If it was healed, the same layers
without healing are measured there, too, and nothing depends on that number. Whether healing helped is decided on the
part that chose: if it did harm, it is undone.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any, NamedTuple

from softless.conversion import healing, recall
from softless.conversion.choosing import Ruler, stand_ins_of
from softless.conversion.fitting import Fitted
from softless.conversion.healing import Healing, Untouched
from softless.conversion.layers import Layers
from softless.conversion.metrics import Rows, damage
from softless.conversion.recall import Generated
from softless.conversion.samples import SampleSet
from softless.conversion.stand_ins import Replacement
from softless.io.parts import stored
from softless.probes.running import Estimate


class Proof(NamedTuple):
    """What the converted model is worth.

    predicted, delivered    harm on the part that chose, and on the part that proves; None if it is not finite
    rows                    the latter, sample by sample
    healing                 what was asked and what it changed; None without healing
    recall, texts           what both models generate; None and [] if the model does not
    """

    predicted: Estimate | None = None
    delivered: Estimate | None = None
    rows: Rows | None = None
    healing: dict[str, Any] | None = None
    recall: dict[str, Any] | None = None
    texts: Sequence[dict[str, Any]] = ()


def prove(
    choose: Ruler, last: Ruler, fitted: Sequence[Fitted], chosen: Sequence[int], *, heal: Healing | None,
    untouched: Untouched | None, learn: SampleSet, size: int, seed: int, advance: Callable[[str, float], None],
) -> Proof:  # fmt: skip
    """Leave the model converted, and healed, and return what it is worth. Healing needs the `untouched` original."""
    if not chosen:
        return Proof()
    layers, work = last.layers, last.work
    depends_on = {**last.depends_on, "layers": list(chosen), "heal": heal and asdict(heal)}

    def generated(which: str) -> Generated:
        def measure() -> dict[str, Any]:
            return recall.generate(layers, last.samples, seed, advance)._asdict()

        return Generated(**(measure() if work is None else stored(work / f"{which}.json", depends_on, measure)))

    asks = recall.askable(layers, last.samples)
    before = generated("original") if asks else None
    harms, rows = [ruler.harm(chosen, "proving") for ruler in (choose, last)], last.compared(chosen, "proving")
    stand_ins, healing_report = stand_ins_of(fitted, chosen), None
    if heal is None or untouched is None:
        put(layers, stand_ins)
    else:
        for ruler in (choose, last):
            ruler.before  # noqa: B018  of the original, before its weights change
        put(layers, deepcopy(stand_ins))
        steps = healing.heal(
            layers, untouched, learn, heal, size=size, seed=seed, depends_on=depends_on, work=work, advance=advance
        )
        after = [ruler.now("healed", depends_on, "proving the healed model") for ruler in (choose, last)]
        helped = _better(after[0], choose.compared(chosen, "proving"))
        healing_report = {
            "minutes": heal.minutes, "rank": heal.rank, "steps": steps, "kept": helped,
            "predicted_before": _document(harms[0]), "delivered_before": _document(harms[1]),
        }  # fmt: skip
        if helped:
            harms = [None if each is None else choose.metric.harm(each) for each in after]
            rows = after[1]
        else:
            untouched.restore()
            put(layers, stand_ins)
    recall_report, texts = (
        (None, []) if before is None else recall.compared(last.samples, before, generated("converted"))
    )
    return Proof(harms[0], harms[1], rows, healing_report, recall_report, texts)


def put(layers: Layers, stand_ins: Mapping[int, Replacement]) -> None:
    """Give layers their stand-ins."""
    for layer, stand_in in stand_ins.items():
        layers.put(layer, stand_in)


def _better(after: Rows | None, before: Rows | None) -> bool:
    """Return whether the first does less damage."""
    healed, plain = damage(after), damage(before)
    return healed is not None and (plain is None or healed < plain)


def _document(harm: Estimate | None) -> dict[str, Any] | None:
    return None if harm is None else asdict(harm)
