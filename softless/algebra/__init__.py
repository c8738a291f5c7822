"""The algebra: State, observe, merge, read, and the four forms that follow. Torch only."""

from softless.algebra.forms import CHUNK, chunked, parallel, recurrent, weights
from softless.algebra.readers import READERS, Gains, read
from softless.algebra.state import Log, State, merge, observe

__all__ = [
    "CHUNK",
    "READERS",
    "Gains",
    "Log",
    "State",
    "chunked",
    "merge",
    "observe",
    "parallel",
    "read",
    "recurrent",
    "weights",
]
