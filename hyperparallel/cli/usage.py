"""Mistakes in a command's words (an unknown option, text for a number) as one line, like all others.

typer reports them with the command's usage and a box. What was allowed is read here from the command's own
signature, since typer's parameters differ between its versions; the words are those that were typed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from hyperparallel.errors import NOTHING, UserError, nearest

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of typer's complaints about what was typed; typer does not export it."""

OPTION_EXAMPLES = {
    "--cluster": "h100",
    "--devices": "8",
    "--fix": "tp=8",
    "--global-batch": "256",
    "--mesh": "dp=2,tp=2",
    "--ranks": "4",
    "--seq": "4096",
    "--steps": "100",
    "--save": "plan.yaml",
    "--top": "5",
    "--within": "0.15",
}
"""What may be written for an option."""


def is_help(error: Exception) -> bool:
    """Whether typer only wants the help printed, because nothing was typed."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_mistake(error: Any, words: Sequence[str], group: Any) -> UserError:
    """A complaint of typer's about `words`, typed after the name of the `group` of commands, as ours."""
    named = next((word for word in words if not word.startswith("-")), None)
    command = group.commands.get(named, group) if error.ctx is None else error.ctx.command
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if option is not None:
        return _of_option(option, command, words)
    if param is not None:
        return _of_parameter(error, command, param, words)
    if command is group:
        near = nearest(named, group.commands, 1) if named else None
        return UserError("command", named or NOTHING, ", ".join(group.commands), near)
    arguments = [param.name.upper() for param in command.params if not param.opts[0].startswith("-")]
    return UserError("arguments", " ".join(words), f"{command.name} {' '.join(arguments)} and options")


def _of_option(option: str, command: Any, words: Sequence[str]) -> UserError:
    """An option that there is not, that lacks its value, or that takes none."""
    known = _options(command)
    if option not in known:
        near = nearest(option.lstrip("-"), [name.lstrip("-") for name in known], 1)
        return UserError("option", option, ", ".join(known), near and f"--{near}")
    given = _typed(words, [option])
    if given is None:
        return UserError(option, NOTHING, "a value after it", _example(option, None))
    return UserError(option, given, "no value after it", option)


def _options(command: Any) -> list[str]:
    """The options of a command as they are typed."""
    named = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    return [name for name in named if name.startswith("--")] + ["--help"] * ("--help" not in named)


def _of_parameter(error: Any, command: Any, param: Any, words: Sequence[str]) -> UserError:
    """A parameter that is missing, or that was given what it can't be."""
    names = [name for name in param.opts if name.startswith("-")]
    field, given = (names or [param.name.upper()])[0], _typed(words, names)
    if given is None:
        help_text = str(getattr(param, "help", None) or "a value").rstrip(".")
        example = _example(field, None) if names else f"hyperparallel {command.name} {field}"
        return UserError(field, NOTHING, help_text, example)
    allowed = _number_words(command, param.name) or error.message.rstrip(".")
    return UserError(field, given, allowed, _example(field, given))


def _typed(words: Sequence[str], names: Sequence[str]) -> str | None:
    """What was typed for an option; None if it was not, or nothing after it."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else next(iter(words[index + 1 :]), None)
    return found


def _number_words(command: Any, name: str) -> str | None:
    """The numbers that a parameter may be, from the signature; None for one that is no number."""
    hint = get_type_hints(inspect.unwrap(command.callback), include_extras=True).get(name)
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = get_args(kind) or (kind,)
    if int not in kinds and float not in kinds:
        return None
    least = next((note.min for note in notes if getattr(note, "min", None) is not None), None)
    words = "a whole number" if int in kinds else "a number"
    return words if least is None else f"{words} of at least {least:g}"


def _example(option: str, given: str | None) -> str:
    """An option with a value that it takes: the one that was meant, where that can be told."""
    try:
        meant = float(given or "")
    except ValueError:
        meant = 0.0
    is_count = 1 <= meant < 1e15 and meant.is_integer()
    value = f"{meant:.0f}" if is_count else OPTION_EXAMPLES.get(option, "VALUE")
    return f"{option} {value}"
