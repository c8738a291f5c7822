"""The twins of a text: small Llamas that differ only in attention.

    softmax    the yardstick, with keys and values of every token in memory
    linear     divides by the sum of its weights, with elu + 1 as feature map
    inline     subtracts the mean
    taylor     1 + q.k of unit vectors
    delta      erases what its memory holds for a key, then writes
    efla       the exact flow of the delta rule
    decay      a memory that fades, at one rate per head
    regress    the best linear predictor of v from k
    nearfar    softmax over the last 16 tokens and the first 4, linear attention over all between

`delta` and `efla` learn the strength of each token, one vector per head and block. `nearfar` learns its feature map.
The others have no parameter that softmax does not have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from softless.errors import ArgumentError, no_such
from softless.train.language_recipe import SOFTMAX, LanguageModel, LanguageRecipe


@dataclass(frozen=True, kw_only=True)
class TextTwin:
    """One language model of a comparison."""

    id: str
    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, base: LanguageRecipe) -> LanguageRecipe:
        """The base recipe with this twin's attention."""
        return replace(base, model=self.model(base.model))

    def model(self, base: LanguageModel) -> LanguageModel:
        """The sizes of a model with this twin's attention."""
        return replace(base, mechanism={"name": self.mechanism, **self.options})


def _twin(name: str, **options: Any) -> TextTwin:
    return TextTwin(id=name, label=name, mechanism=name, options=options)


TEXT_TWINS: tuple[TextTwin, ...] = (
    _twin(SOFTMAX), _twin("linear"), _twin("inline"), _twin("taylor"), _twin("delta"), _twin("efla"), _twin("decay"),
    _twin("regress", relative=False), _twin("nearfar", window=16),
)  # fmt: skip


def text_twins_named(ids: Iterable[str]) -> tuple[TextTwin, ...]:
    """Return twins by id, in the order given; an unknown id raises an error that lists all ids."""
    known = {twin.id: twin for twin in TEXT_TWINS}
    if unknown := [id_ for id_ in ids if id_ not in known]:
        raise ArgumentError(no_such("twin", unknown[0], known))
    return tuple(known[id_] for id_ in dict.fromkeys(ids))
