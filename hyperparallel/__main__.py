"""`python -m hyperparallel` is the command line; Ctrl-C while that is being imported ends it as later on."""

import sys


def main() -> None:
    """Load the command line, run it and exit with its status."""
    try:
        from hyperparallel.cli.__main__ import main as run_commands

        run_commands()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
