"""What the environment may say: each variable of ours with its values, read in one place.

A name that begins like ours and is none, or another value, is refused when a job starts: it would be
a setting that does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hyperparallel.errors import UserError, nearest

PREFIX = "HYPERPARALLEL_"
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "HYPERPARALLEL_TRANSPORT": ("auto", "messages"),
    "HYPERPARALLEL_DEBUG": ("collectives",),
}


def read_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ours that are set, checked; an empty value counts as none.

    >>> read_settings({"HYPERPARALLEL_DEBUG": "collectives", "HOME": "/root"})
    {'HYPERPARALLEL_DEBUG': 'collectives'}
    """
    given = os.environ if environment is None else environment
    # An empty value is how a shell unsets a variable for one command.
    found = {name: value for name, value in given.items() if name.startswith(PREFIX) and value}
    for name, value in found.items():
        if name not in VARIABLES:
            raise UserError("environment", name, ", ".join(VARIABLES), nearest(name, VARIABLES, 1))
        if value not in VARIABLES[name]:
            near = nearest(value, VARIABLES[name], 1)
            raise UserError(name, value, " or ".join(VARIABLES[name]), near and f"{name}={near}")
    return found
