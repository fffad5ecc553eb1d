"""`hyperparallel doctor`: the command, what it reads from the machine, and what it says of it."""
