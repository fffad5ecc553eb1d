"""The keys of a configuration file, read with their types; what is missing or wrong is named.

A published configuration holds many keys that say nothing about cost, so unknown keys are ignored here,
unlike in files that our users write. Sizes that only the author can know have no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperparallel.errors import ModelError, nearest


class Fields:
    """Typed access to the keys of one configuration; `where` names the file in messages.

    Every method takes the names under which a fact is known, the first present and not null wins.

    >>> fields = Fields({"n_embd": 64, "tie": None}, "config.json")
    >>> fields.size("hidden_size", "n_embd"), fields.flag("tie", True)
    (64, True)
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer; `default` None means that the key must be there."""
        return self._integer(names, 1, "a positive integer", default)

    def count(self, *names: str, default: int = 0) -> int:
        """An integer that may be 0."""
        return self._integer(names, 0, "an integer, 0 or more", default)

    def _integer(self, names: tuple[str, ...], least: int, allowed: str, default: int | None) -> int:
        name, value = self._find(names)
        if value is None:
            if default is None:
                raise self.missing(names, allowed)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"{self.where}: {name}", value, allowed)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name}", value, "true or false")
        return value

    def fraction(self, name: str, default: float = 0.0) -> float:
        """A number from 0 up to 1."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"{self.where}: {name}", value, "a number from 0 to 1")
        return float(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of integers, empty where the key is missing."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ModelError(f"{self.where}: {name}", value, "a list of integers")
        return tuple(value)

    def words(self, name: str, length: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """One of the `known` words for each of `length` layers, empty where the key is missing."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) < length:
            raise ModelError(f"{self.where}: {name}", value, f"a list of {length} words, one for each layer")
        for word in value[:length]:
            if word not in known:
                instead = nearest(str(word), known, 1)
                raise ModelError(f"{self.where}: {name}", word, f"one of {', '.join(known)}", instead)
        return tuple(value[:length])

    def has(self, name: str) -> bool:
        """Whether the key is there with a value."""
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """A nested configuration."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.missing((name,), "a nested configuration")
        return Fields(value, f"{self.where}: {name}")

    def missing(self, names: tuple[str, ...], allowed: str) -> ModelError:
        """The error for a key that is not there; says which of the keys that are there looks like it."""
        near = nearest(names[0], self.values, 1)
        hint = "" if near is None else f"; the nearest key there is {near}"
        field = " or ".join(names)
        return ModelError(f"{self.where}: {field}", "no such key", f"{allowed}{hint}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        return names[0], None
