"""The command line's entry: its commands, and how their failures end.

A user's mistake is one line on stderr and exit status 2, a failed run its message and 1, Ctrl-C
130. Anything else is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hyperparallel.cli.compare import compare
from hyperparallel.cli.doctor import doctor
from hyperparallel.cli.plan import plan
from hyperparallel.cli.show import show
from hyperparallel.cli.sweep import sweep
from hyperparallel.cli.train import train
from hyperparallel.errors import RunError, UserError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except RunError as error:
            typer.echo(f"run failed: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


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
