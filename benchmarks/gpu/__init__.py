"""`make gpu`: everything that wants a CUDA device, in one command of at most eight minutes."""
