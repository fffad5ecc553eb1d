"""What YAML and pydantic say against something a person wrote, in our words.

Both complain in words of their own, about scanners and Python types. Here these become what a `UserError`
needs: what stands there, what is allowed, what to write instead.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from hyperparallel.errors import NOTHING, Words


class Trouble(NamedTuple):
    """The last three arguments of a `UserError`."""

    given: object
    allowed: str
    instead: str | None = None


_KINDS = (
    (("tuple", "list", "set"), "a list, in brackets"),
    (("dict", "mapping", "dataclass", "model"), "a mapping of names to values"),
    (("int",), "a whole number"),
    (("float", "finite"), "a number, in the unit that the name says"),
    (("bool",), "true or false"),
    (("string",), "text"),
    (("path",), "the name of a file or folder"),
    (("none",), "nothing (null)"),
)
"""How pydantic's kinds of complaint begin, and what they mean."""

_BOUNDS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: the first would be dropped in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key is not None and key != "<<":
                problem = f"each key once: {key!r} stands here again"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """What a text of YAML or JSON says; `yaml.YAMLError` for one that is none, or has a key twice.

    >>> load_yaml("mesh: {dp: 2}")
    {'mesh': {'dp': 2}}
    """
    return yaml.load(text, _OnceLoader)


def no_yaml(error: Any, where: str = "") -> Trouble:
    """For a `yaml.YAMLError`: where the text stops being YAML, and what is wrong there. where: its name."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or "it holds characters that text does not have")
    hint = None
    if "'\\t'" in problem:
        problem, hint = "a tab stands where lines are indented", "spaces"
    elif mark is not None and mark.buffer is not None and mark.index >= len(mark.buffer) - 1:
        problem, hint = f"{problem}: the text ends too early", "the rest of the file"
    place = [where] if where else []
    place += [f"line {mark.line + 1}, column {mark.column + 1}"] if mark is not None else []
    return Trouble(Words(", ".join(place) or "text"), f"YAML or JSON ({problem})", hint)


def asked_for(error: Mapping[str, Any]) -> str:
    """What one of pydantic's complaints asks for: "a whole number", "at least 1"."""
    said, given = error["type"], error.get("ctx", {})
    if said in _BOUNDS:
        return _BOUNDS[said].format(**given)
    if said in ("literal_error", "enum"):
        return f"one of {str(given['expected']).replace(' or ', ', ')}"
    for begins, words in _KINDS:
        if said.startswith(begins):
            return words
    return str(error["msg"])


def shown(value: Any) -> Any:
    """A value for a message: whole where it is short."""
    if value is None:
        return NOTHING
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel, short.maxdict, short.maxlist = 2, 3, 3
    return Words(short.repr(value))
