"""Every mechanism by name, in one hand-written table."""

import numbers
from dataclasses import fields
from typing import Any

from softless.errors import ArgumentError, did_you_mean, no_such, shown
from softless.mechanisms.agent import Agent
from softless.mechanisms.angular import Angular
from softless.mechanisms.asymmetric_nonlocal import AsymmetricNonLocal
from softless.mechanisms.base import Call, Mechanism
from softless.mechanisms.cosformer import Cosformer
from softless.mechanisms.decay import Decay
from softless.mechanisms.delta import Delta, Efla
from softless.mechanisms.diagonal import Diagonal
from softless.mechanisms.efficient import A2, Efficient
from softless.mechanisms.emanet import EMANet
from softless.mechanisms.focused import Focused
from softless.mechanisms.general import General
from softless.mechanisms.hydra import Hydra
from softless.mechanisms.linear import InLine, Linear
from softless.mechanisms.linformer import Linformer
from softless.mechanisms.longformer import Longformer
from softless.mechanisms.mlla import Mlla
from softless.mechanisms.non_local import NonLocal
from softless.mechanisms.nystrom import Nystrom
from softless.mechanisms.performer import Performer
from softless.mechanisms.reformer import Reformer
from softless.mechanisms.scored import MOST
from softless.mechanisms.soft import Soft
from softless.mechanisms.softmax import Softmax
from softless.mechanisms.sparse import Sparse
from softless.mechanisms.taylor import Taylor
from softless.mechanisms.threshold import Threshold
from softless.mechanisms.topk import TopK
from softless.mechanisms.transnormer import TransNormer

MECHANISMS: dict[str, type[Mechanism]] = {
    each.name: each
    for each in (
        *(Softmax, General, Linear, InLine, Efficient, Taylor, Hydra, Angular, Focused, Threshold),
        *(Cosformer, Performer, Delta, Efla, Decay, TransNormer, Diagonal, Mlla, A2),
        *(TopK, Sparse, Longformer, Linformer, Nystrom, Agent, Soft, NonLocal, AsymmetricNonLocal, EMANet, Reformer),
    )
}
OPTIONS = {name: {field.name: field.default for field in fields(each)} for name, each in MECHANISMS.items()}
PLAIN = {name: each() for name, each in MECHANISMS.items() if each is not General}  # general needs a sim

__all__ = ["MECHANISMS", "Call", "Mechanism", "list_mechanisms", "mechanism", "resolve"]


def mechanism(name: str, **options: object) -> Mechanism:
    """Return a mechanism with its options: a frozen, hashable value that `attention` takes instead of a name.

    >>> import softless
    >>> softless.mechanism("linear", phi="relu")
    Linear(phi='relu', phi_k=None, t=1.0, normalize='divide')
    >>> softless.mechanism("threshold", tau=2, expansion="minimax", tail="mean").tau
    2

    Args:
        name: A name from `list_mechanisms()`. An unknown name raises and lists the known ones.
        options: The options of the mechanism, plain values by name, such as `phi="relu"`. Each has a default. An
            unknown option raises and lists the known ones.

    Returns:
        The mechanism, with its options as attributes.
    """
    if not isinstance(name, str) or name not in MECHANISMS:
        raise ArgumentError(no_such("mechanism", name, MECHANISMS))
    if not options and name in PLAIN:
        return PLAIN[name]
    if unknown := [option for option in options if option not in OPTIONS[name]]:
        takes = f"it takes {', '.join(OPTIONS[name])}" if OPTIONS[name] else "it takes no options"
        hint = did_you_mean(unknown[0], OPTIONS[name]) or takes
        raise ArgumentError(f"mechanism '{name}' has no option {', '.join(map(repr, unknown))}: {hint}")
    return MECHANISMS[name](**{option: _plain(name, option, value) for option, value in options.items()})


def resolve(mechanism_or_name: object) -> Mechanism:
    """A mechanism as it is, or by its name."""
    if isinstance(mechanism_or_name, Mechanism):
        return mechanism_or_name
    if not isinstance(mechanism_or_name, str):
        given = type(mechanism_or_name).__name__
        raise ArgumentError(f"mechanism is a {given} and must be a name or a Mechanism")
    return mechanism(mechanism_or_name)


def _plain(name: str, option: str, value: Any) -> object:
    """An option's value as a plain one, which its class then judges: a switch takes a bool, a number takes a number.

    A number of NumPy becomes one of Python. A bool is not a number.
    """
    default = OPTIONS[name][option]
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ArgumentError(f"mechanism '{name}' takes {option}=True or False, got {shown(value)}")
    if type(default) in (int, float) and type(value) not in (int, float):
        raise ArgumentError(f"mechanism '{name}' takes a number for {option}, got {shown(value)}")
    if not (value is None or isinstance(value, str | int | float | tuple) or callable(value)):
        kind = type(value).__name__
        raise ArgumentError(f"mechanism '{name}' takes a plain value for {option}, got a {kind}: {shown(value)}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ArgumentError(f"mechanism '{name}' takes no number as large as {option}={shown(value)}")
    return value


def list_mechanisms() -> list[str]:
    """Names that `mechanism` and `attention` take.

    >>> import softless
    >>> softless.list_mechanisms()[:4]
    ['softmax', 'general', 'linear', 'inline']
    """
    return list(MECHANISMS)
