"""What takes the place of a softmax: a linear mechanism with the tensors that it learns, and on pictures a residual.

    o = attention(q, k, v, mechanism)        [+ 3x3 local residual of v]

A residual begins at zero: its last layer has no weights yet, so a stand-in without a fit is the mechanism alone.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from softless.errors import UnsupportedError
from softless.mechanisms import Mechanism, mechanism
from softless.nn.inputs import Inputs
from softless.nn.local_residual import LocalResidual

LOCAL = "+local"


@dataclass(frozen=True)
class Candidate:
    """A mechanism that may take the place of a softmax, with or without InLine's local residual.

    >>> from softless.mechanisms import mechanism
    >>> Candidate(mechanism("linear", phi="relu"), local=True).label
    'linear phi=relu +local'
    """

    mechanism: Mechanism
    local: bool = False

    @property
    def label(self) -> str:
        """The name, the options that differ from the defaults, and +local with the residual."""
        chosen = self.mechanism
        options = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
        plain = {field.name: field.default for field in fields(chosen)}
        changed = (f"{name}={value}" for name, value in options.items() if value != plain[name])
        return " ".join([chosen.name, *changed, *([LOCAL] if self.local else [])])

    def entry(self) -> dict[str, Any]:
        """Return the candidate as a JSON document holds it."""
        options = asdict(self.mechanism)
        if unsaved := [name for name, value in options.items() if callable(value)]:
            raise UnsupportedError(
                f"{unsaved[0]} of mechanism '{self.mechanism.name}' is a function, which no file can hold"
            )
        return {"name": self.mechanism.name, "options": options, "local": self.local}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Candidate":
        """Read what `entry` wrote."""
        return cls(mechanism(entry["name"], **entry["options"]), bool(entry["local"]))


class Replacement(nn.Module):
    """The learned part of a candidate in one layer.

    inputs      what the mechanism learns
    residual    the local residual, or None
    """

    def __init__(self, candidate: Candidate, inputs: Inputs):
        super().__init__()
        self.candidate, self.inputs = candidate, inputs
        self.residual: LocalResidual | None = None
        if candidate.local:
            self.residual = LocalResidual(inputs.heads * inputs.head_dim, inputs.heads)
            for x in self.residual[-1].parameters():
                nn.init.zeros_(x)

    @property
    def mechanism(self) -> Mechanism:
        return self.candidate.mechanism
