"""All mechanisms by name, in one hand-written table."""

import numbers
from dataclasses import fields
from typing import Any

from softless.errors import ArgumentError, did_you_mean, no_such, shown
from softless.mechanisms.angular import Angular
from softless.mechanisms.base import Call, Mechanism
from softless.mechanisms.cosformer import Cosformer
from softless.mechanisms.decay import Decay
from softless.mechanisms.delta import Delta, Efla
from softless.mechanisms.efficient import A2, Efficient
from softless.mechanisms.emanet import EMANet
from softless.mechanisms.focused import Focused
from softless.mechanisms.general import General
from softless.mechanisms.hydra import Hydra
from softless.mechanisms.landmarks import Agent, Nystrom, Soft
from softless.mechanisms.linear import Blend, InLine, Linear
from softless.mechanisms.linformer import Linformer
from softless.mechanisms.longformer import Longformer
from softless.mechanisms.mlla import Mlla
from softless.mechanisms.nearfar import NearFar
from softless.mechanisms.non_local import AsymmetricNonLocal, NonLocal
from softless.mechanisms.performer import Performer
from softless.mechanisms.reformer import Reformer
from softless.mechanisms.regress import Regress
from softless.mechanisms.scored import MOST
from softless.mechanisms.softmax import Softmax
from softless.mechanisms.sparse import Sparse, TopK
from softless.mechanisms.taylor import Taylor
from softless.mechanisms.threshold import Threshold
from softless.mechanisms.transnormer import Diagonal, TransNormer

MECHANISMS: dict[str, type[Mechanism]] = {
    cls.name: cls
    for cls in (
        *(Softmax, General, Linear, InLine, Blend, Regress, Efficient, Taylor, Hydra, Angular, Focused, Threshold),
        *(NearFar, Cosformer, Performer, Delta, Efla, Decay, TransNormer, Diagonal, Mlla, A2),
        *(TopK, Sparse, Longformer, Linformer, Nystrom, Agent, Soft, NonLocal, AsymmetricNonLocal, EMANet, Reformer),
    )
}
OPTIONS = {name: {field.name: field.default for field in fields(cls)} for name, cls in MECHANISMS.items()}
NUMBERS = {
    name: [field.name for field in fields(cls) if field.type in (int, float)] for name, cls in MECHANISMS.items()
}
PLAIN = {name: cls() for name, cls in MECHANISMS.items() if cls is not General}  # general needs a sim

__all__ = ["MECHANISMS", "Call", "Mechanism", "list_mechanisms", "mechanism", "resolve"]


def mechanism(name: str, **options: object) -> Mechanism:
    """Return a mechanism with its options, which `attention` takes instead of a name. It is frozen and hashable.

    >>> import softless
    >>> softless.mechanism("linear", phi="relu")
    Linear(phi='relu', phi_k=None, t=1.0, normalize='divide')
    >>> softless.mechanism("threshold", tau=2, expansion="minimax", tail="mean").tau
    2

    name      one of `list_mechanisms()`; an unknown name raises an `ArgumentError` with the nearest known one
    options   as below; an option that the mechanism does not have raises an `ArgumentError` that lists those it has

    Feature maps (phi, phi_k) are identity, relu, leaky_relu, elu, exp, softmax, affine_relu, or any callable.

    softmax              confusion=None: make q unit vectors of the feature map "relu" or "affine_relu"; None: keep q
    general              sim: a function of q [B, H, N, d] and k [B, H, M, d] that returns [B, H, N, M]; required
    linear               phi="elu": feature map of q, and of k if phi_k is None
                         phi_k=None: feature map of k
                         t=1.0: factor in exp(t x), for the feature map exp
                         normalize="divide": divide by the sum of the weights, or "none"
    inline               phi="identity", phi_k=None, t=1.0: as for linear
                         gain="mean": multiply by s/n, as the authors' code does, or "sum": by s, as eq. 4 is printed
    blend                phi="elu", phi_k=None, t=1.0: as for linear
    regress              phi="identity", phi_k=None, t=1.0: as for inline, except that no feature map is exp
                         ridge=0.1: how strongly the regression is held back, from 0 on, or "learned" for each head
                         relative=True: multiply the ridge by the mean variance of keys; False: divide it by n
                         gain="dim": multiply by d^-1/2, or "one": by 1, or "learned": by d^-1/2 and a factor per head
                         center=True: read q - mean k; False: read q
                         weighting=None: all keys count alike; "query": by softmax(mean q . k / sqrt d)
    taylor               order=1: terms of the exponential, 1 or 2
                         normalize=None: use unit vectors; None means yes for order 1 and no for order 2
    angular              exact=False: use the kernel itself instead of the published formula
    focused              p=3.0: power that sharpens the features, from 1 to 16
                         learned_scale=False: divide the features by softplus of a learned scale
    threshold            tau=1.0: how far below the largest score of a row a score is kept
                         expansion="max": point of the expansion, "max", "mean" or "minimax"
                         tail="drop": weight of the other scores, "drop" (none) or "mean"
    nearfar              window=64: last tokens whose scores count exactly; not causal: those less than 64 away
                         first=4: first tokens whose scores count exactly
                         maps="shared": learned features, or "separate" (of q and of k), or "identity" (not learned)
                         features=None: rows of a learned map; None means the channels of a head
                         neighborhood=None: instead of the window, the k x k tokens of a picture around each token
    cosformer            length=None: longest sequence; None means the length of each sequence, which is not causal
    performer            kind="positive": random features, "positive" or "hyperbolic"
                         features=None: number of random features; None means d ln d, at least d
    decay                slopes="lightning": rates of the heads, "lightning" or "retention"
                         factor=1.0: factor on the rates
    transnormer          variant="t2": "t1" or "t2" of the paper
    diagonal             variant="t2": "t1" or "t2" of the paper
                         block=64: tokens per block
    topk                 k=32: keys per query
    sparse               pattern="local+strided": "local", "strided", "local+strided" or "fixed"
                         stride=64: length of the window, and distance of the strided keys
                         summary=4: keys per group that all queries see, for pattern "fixed"
    longformer           window=256: keys that a query sees to each side
                         global_tokens=1: first tokens that see all tokens and are seen by all
    linformer            rank=256: rows of the projections of k and v
                         length=4096: longest sequence
                         share="kv": one projection for k and v, or "heads": one each, or "none": one each per head
    nystrom              landmarks=64: number of landmarks
                         steps=6: steps of the pseudo-inverse
    agent                agents=49: number of agents
    soft                 landmarks=49: number of landmarks
    nonlocal             pairing="softmax": "softmax", "dot" or "concatenation"
    asymmetric_nonlocal  pyramid=(1, 9, 36, 64): number of means at each level
    emanet               bases=64: number of bases
                         rounds=3: rounds of expectation maximization
                         detach=True: no gradient through the bases, as published
    reformer             buckets=32: hash buckets per round, an even number
                         rounds=4: rounds of hashing
                         window=64: neighbors to each side within a bucket
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
    """Return a mechanism as it is, or make one from its name."""
    if isinstance(mechanism_or_name, Mechanism):
        return mechanism_or_name
    if not isinstance(mechanism_or_name, str):
        kind = type(mechanism_or_name).__name__
        raise ArgumentError(f"mechanism is a {kind} and must be a name or a Mechanism")
    return mechanism(mechanism_or_name)


def _plain(name: str, option: str, value: Any) -> object:
    """Return the value of an option as a plain Python value, or raise if its type is wrong.

    A switch takes a bool and a number takes a number; a bool is not a number. NumPy numbers become Python numbers. The
    class of the mechanism checks the range.
    """
    default = OPTIONS[name][option]
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ArgumentError(f"mechanism '{name}' takes {option}=True or False, got {shown(value)}")
    if option in NUMBERS[name] and type(value) not in (int, float):
        raise ArgumentError(f"mechanism '{name}' takes a number for {option}, got {shown(value)}")
    if not (value is None or isinstance(value, str | int | float | tuple) or callable(value)):
        kind = type(value).__name__
        raise ArgumentError(f"mechanism '{name}' takes a plain value for {option}, got a {kind}: {shown(value)}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ArgumentError(f"mechanism '{name}' takes no number as large as {option}={shown(value)}")
    return value


def list_mechanisms() -> list[str]:
    """Return the names that `mechanism` and `attention` take.

    >>> import softless
    >>> softless.list_mechanisms()[:4]
    ['softmax', 'general', 'linear', 'inline']
    """
    return list(MECHANISMS)
