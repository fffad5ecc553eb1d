"""The exceptions users meet, and how their messages are built.

Every user mistake is a `UserError` (a `ValueError`) whose message names the field, what was given,
what is allowed and what to write instead. Failures that are not mistakes of the user (a rank died, a
deadline passed) are `RunError`s and name the rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Words(str):
    """For `UserError.given`: a description of what was given, printed without quotes.

    >>> print(UserError("axis", Words("nothing"), "a name"))
    axis: got nothing; allowed: a name
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


NOTHING = Words("nothing")
"""For `UserError.given`: a field or an argument that is needed was left out."""


class HyperParallelError(Exception):
    """Base of every exception that this package raises on purpose.

    >>> issubclass(UserError, HyperParallelError), issubclass(RunError, HyperParallelError)
    (True, True)
    """


class UserError(HyperParallelError, ValueError):
    """A mistake in what the user wrote: field, given, allowed, instead.

    >>> print(UserError("axis", "tq", "one of dp, tp", instead="tp"))
    axis: got 'tq'; allowed: one of dp, tp; write tp instead
    """

    def __init__(self, field: str, given: object, allowed: str, instead: str | None = None) -> None:
        self.field, self.given, self.allowed, self.instead = field, given, allowed, instead
        message = f"{field}: got {given!r}; allowed: {allowed}"
        super().__init__(message + (f"; write {instead} instead" if instead else ""))

    def __reduce__(self) -> tuple[type[UserError], tuple[object, ...]]:
        # What is given may not pickle; its words are in the message anyway.
        return type(self), (self.field, Words(repr(self.given)), self.allowed, self.instead)


class LayoutError(UserError):
    """A mesh or layout that makes no sense, or does not fit its tensor."""


class PlanError(UserError):
    """A plan entry that matches nothing, or that cannot be followed."""


class ClusterError(UserError):
    """A machine description that is incomplete, impossible, or not divisible as asked."""


class ModelError(UserError):
    """A model description that lacks a key, holds an impossible value, or is of an unknown family."""


class CaptureError(UserError):
    """A model that cannot be turned into a graph; the message names the user's line."""


class DataError(UserError):
    """Training data that is missing, empty or unreadable."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class TraceError(UserError):
    """A trace file that is missing, damaged, or no trace."""


class RunError(HyperParallelError, RuntimeError):
    """A run that failed: names the rank, and what that rank was doing.

    >>> raise RunError("rank 1 in step 3: ZeroDivisionError")
    Traceback (most recent call last):
    hyperparallel.errors.RunError: rank 1 in step 3: ZeroDivisionError
    """


_ALIKE = 0.5
"""Share of their letters that two names must have in common, in order, for one to be a slip for the other."""


def nearest(given: str, known: Iterable[str], count: int = 3) -> str | None:
    """The known names closest to `given`, as text for an error message; None where none is like it.

    Names that begin with what was given come first, however long they are; case does not matter.

    >>> nearest("layerz.0", ["layers.0", "head"])
    'layers.0'
    >>> nearest("gb200", ["b200", "gb200-nvl72"], 1)
    'gb200-nvl72'
    >>> nearest("hypercube", ["switch", "mesh"]) is None
    True
    """
    names = {name.lower(): name for name in known}
    wanted = given.lower()
    begin = [name for name in names if wanted and name.startswith(wanted)]
    close = difflib.get_close_matches(wanted, list(names), n=count, cutoff=_ALIKE)
    found = list(dict.fromkeys(begin + close))[:count]
    return ", ".join(names[name] for name in found) or None
