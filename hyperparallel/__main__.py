"""`python -m hyperparallel` is the command line."""

from hyperparallel.cli.__main__ import main

main()
