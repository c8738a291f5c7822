"""Recipes from small TOML files, by path or by the name of one that comes with softless."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import softless
from softless.data.augment import Augment
from softless.errors import ArgumentError, FileError, did_you_mean
from softless.train.recipe import Architecture, Recipe

DEFAULT = "digits"
LARGEST = 2**16  # bytes
TABLES: dict[str, type] = {"model": Architecture, "augment": Augment}

T = TypeVar("T")


def shipped() -> dict[str, Path]:
    """The recipes that come with softless: inside the package once installed, beside it in a checkout."""
    package = Path(str(softless.__file__)).parent
    folder = next((place for place in (package / "recipes", package.parent / "recipes") if place.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_recipe(name: str = DEFAULT, changes: Iterable[tuple[str, str]] = ()) -> Recipe:
    """The recipe of this file or name, with changes such as ("epochs", "3") or ("model.local", "false").

    >>> from softless.train.recipe_file import read_recipe
    >>> recipe = read_recipe("digits", [("epochs", "3"), ("model.mechanism", "softmax")])
    >>> recipe.epochs, recipe.model.mechanism
    (3, 'softmax')
    """
    return changed(document_of(name), changes)


def changed(document: Mapping[str, Any], changes: Iterable[tuple[str, str]]) -> Recipe:
    """A recipe's keys with some changed, as text from a command line."""
    plain = {**document}
    tables: dict[str, Any] = {key: dict(document[key]) for key in TABLES if isinstance(document.get(key), dict)}
    for key, text in changes:
        table, dot, inner = key.rpartition(".")
        if key in TABLES:
            _made(TABLES[key], value := _value(text), f"[{key}]")
            tables[key] = value
        elif not dot:
            plain[key] = _value(text)
        elif table in TABLES:
            tables.setdefault(table, {})[inner] = _value(text)
        else:
            raise ArgumentError(f"{key!r} is not a key of a recipe: its tables are {' and '.join(TABLES)}")
    return from_document(plain | tables)


def from_document(document: Mapping[str, Any]) -> Recipe:
    """A recipe from its keys; one that means nothing is named."""
    tables: dict[str, Any] = {key: _made(cls, document.get(key, {}), f"[{key}]") for key, cls in TABLES.items()}
    return _made(Recipe, {**document, **tables}, "a recipe")


def to_document(recipe: Recipe) -> dict[str, Any]:
    """Plain values, as JSON and TOML have them."""
    return asdict(recipe)


def document_of(name: str) -> dict[str, Any]:
    """The keys in the file, as they are."""
    path, known = Path(name), shipped()
    if path.suffix != ".toml" and name in known:
        path = known[name]
    try:
        if not path.is_file():
            hint = did_you_mean(name, known)
            named = f"a recipe of softless: {hint}" if hint else f"one of {', '.join(known)}"
            raise FileError(f"recipe {name!r} is neither a file nor {named}")
        if path.stat().st_size > LARGEST:
            raise FileError(f"{path}: it is larger than a recipe can be, {LARGEST} bytes")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: it is no TOML ({error})") from error


def _value(text: str) -> Any:
    """A number, a switch, a list or a table as TOML writes it; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _made(cls: type[T], given: Any, what: str) -> T:
    if not isinstance(given, dict):
        raise ArgumentError(f"{what} is {given!r} and must be a table of keys")
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f"it has {', '.join(known)}"
            raise ArgumentError(f"{key!r} is not a key of {what}: {hint}")
    values = {
        key: tuple(value) if isinstance(value, list) and cls is Augment else value for key, value in given.items()
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise ArgumentError(f"{what} has a value of the wrong kind: {error}") from None
