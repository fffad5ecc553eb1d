"""Write `docs/api.md` from the docstrings of the public names; run as `python -m checks.api`.

Each name of `hyperparallel.__all__` stands there once, by what it is for, with its signature, the text of its
docstring and the docstring's example, which the tests run. A name that is in no room, or that has no
example, is an error. `tests/test_api.py` holds the committed page to what would be written.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import hyperparallel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
ROOMS = {
    "Describe": ("Mesh", "Layout", "Plan"),
    "Run": ("parallelize", "TrainStep", "Part", "PartsStep", "launch"),
    "Look and prove": ("derive", "certify", "capture", "Captured"),
    "Code of your own per rank": (
        *("local_region", "axis_index", "axis_size", "all_reduce", "all_gather", "reduce_scatter"),
        *("all_to_all", "ppermute", "broadcast"),
    ),
    "Ops of your own": ("register_rule", "register_local_form"),
    "Checkpoints": (
        *("save_checkpoint", "load_checkpoint", "save_safetensors", "load_safetensors", "Checkpointer"),
    ),
    "Errors": ("HyperParallelError", "UserError", "RunError"),
}
HEAD = """# The public names

Written by `make docs` from the docstrings; edit those. Every example runs in the tests.
`import hyperparallel` loads none of it: each name is loaded when it is first used.
"""


def page() -> str:
    """The text of the page; `ValueError` for a public name that has no room or no example."""
    public = {name for name in hyperparallel.__all__ if name != "__version__"}
    roomed = [name for names in ROOMS.values() for name in names]
    if public != set(roomed) or len(roomed) != len(public):
        raise ValueError(f"not once in checks/api.py: {sorted(public ^ set(roomed))}")
    parts = [HEAD]
    for room, names in ROOMS.items():
        parts += [f"## {room}\n", *(entry(name) for name in names)]
    return "\n".join(parts)


def entry(name: str) -> str:
    """One name: its signature, what is said of it, its example."""
    value = getattr(hyperparallel, name)
    text, example = parted(inspect.getdoc(value) or "")
    if not example:
        raise ValueError(f"{name} has no example in its docstring")
    lines = [f"### `{name}`\n", "```text", f"{name}{signature(value)}", "```\n", text, ""]
    return "\n".join([*lines, "```pycon", example, "```\n"])


def parted(text: str) -> tuple[str, str]:
    """The words of a docstring, and its example."""
    words, prompt, example = text.partition(">>>")
    return words.strip(), (prompt + example).strip()


def signature(value: Any) -> str:
    """Arguments with their types, one a line where they are many."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an exception that takes what every exception takes
        return "(*args)"
    plain = _unquoted(str(found))
    if len(plain) <= 90:
        return plain
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    lines, by_name = [], False
    for one in found.parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not by_name:
            lines.append("    *,")
            by_name = True
        by_name = by_name or one.kind in marks
        lines.append(f"    {_unquoted(str(one))},")
    _, arrow, result = plain.rpartition(" -> ")
    return "\n".join(["(", *lines, f"){arrow}{result}" if arrow else ")"])


def _unquoted(text: str) -> str:
    """Types as they are written in the code, which Python keeps as text."""
    return re.sub(r"""(: |-> )(['"])(.*?)\2(?=[,)]| = |$)""", r"\1\3", text)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
