"""The mechanisms a study compares: each one of the table, with the options people use."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from softless.errors import ArgumentError, did_you_mean
from softless.mechanisms import Mechanism, list_mechanisms, mechanism


@dataclass(frozen=True)
class Case:
    """A mechanism under the name it has in a report. `head_dim` overrides the study's, where features grow with it."""

    label: str
    name: str
    options: dict[str, object] = field(default_factory=dict)
    head_dim: int | None = None

    @property
    def mechanism(self) -> Mechanism:
        return mechanism(self.name, **self.options)


CASES = (
    Case("softmax", "softmax"),
    Case("inline", "inline"),
    Case("linear elu", "linear", {"phi": "elu"}),
    Case("linear relu", "linear", {"phi": "relu"}),
    Case("efficient", "efficient"),
    Case("taylor", "taylor"),
    Case("taylor order 2", "taylor", {"order": 2}, head_dim=16),
    Case("hydra", "hydra"),
    Case("angular", "angular"),
    Case("focused", "focused"),
    Case("threshold", "threshold"),
    Case("threshold minimax", "threshold", {"expansion": "minimax", "tail": "mean"}),
    Case("asymmetric", "asymmetric_nonlocal"),
)


def study_cases() -> tuple[Case, ...]:
    """`CASES`, then every other mechanism that runs on q, k and v alone, with its default options."""
    named = {case.name for case in CASES}
    others = (Case(name, name) for name in list_mechanisms() if name not in named)
    return (*CASES, *(case for case in others if _runs_alone(case)))


def cases_named(names: Iterable[str]) -> tuple[Case, ...]:
    """Cases by label, or mechanisms by name with their default options; "all" is every one."""
    every = study_cases()
    known = {case.name: Case(case.name, case.name) for case in every} | {case.label: case for case in every}
    names = list(dict.fromkeys(names))
    if names == ["all"]:
        return every
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known) or f"there are {', '.join(known)}, or all"
        raise ArgumentError(f"{', '.join(map(repr, unknown))} cannot be compared: {hint}")
    return tuple(known[name] for name in names)


def _runs_alone(case: Case) -> bool:
    try:
        made = case.mechanism
    except ArgumentError:
        return False
    return not made.inputs and not made.needs_grid and made.lacks(is_causal=False) is None
