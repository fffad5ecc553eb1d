"""The command line's entry: its commands, and how their failures end.

A user's mistake is one line on stderr and exit status 2, a failed run its message and 1, Ctrl-C
130. Anything else is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from hyperparallel.cli.compare import compare
from hyperparallel.cli.doctor.doctor import doctor
from hyperparallel.cli.plan import plan
from hyperparallel.cli.show import show
from hyperparallel.cli.sweep import sweep
from hyperparallel.cli.train import train
from hyperparallel.cli.usage import UsageError, is_help, usage_mistake
from hyperparallel.errors import RunError, UserError


class _Commands(TyperGroup):
    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        words = list(args)
        with _ending(words, self):
            ctx = super().make_context(info_name, args, parent, **extra)
            ctx.meta[_WORDS] = words
            return ctx

    def invoke(self, ctx: Any) -> Any:
        with _ending(ctx.meta[_WORDS], self):
            return super().invoke(ctx)


_WORDS = "hyperparallel.words"


@contextmanager
def _ending(words: Sequence[str], group: TyperGroup) -> Iterator[None]:
    """End with a line and a status where something fails; words: what was typed after the program's name."""
    try:
        yield
    except UserError as error:
        raise _exit(2, f"error: {error}") from None
    except UsageError as error:
        if is_help(error):
            raise
        raise _exit(2, f"error: {usage_mistake(error, words, group)}") from None
    except RunError as error:
        raise _exit(1, f"run failed: {error}") from None
    except KeyboardInterrupt:
        raise _exit(130, "stopped") from None


def _exit(status: int, line: str) -> typer.Exit:
    typer.echo(line, err=True)
    return typer.Exit(status)


app = typer.Typer(
    name="hyperparallel",
    help="Write single-device PyTorch; derive and run the distributed program.",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, plan, sweep, show, compare, doctor):
    app.command()(command)


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
