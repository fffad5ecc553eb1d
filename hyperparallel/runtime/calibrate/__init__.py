"""This machine, timed: the measurements behind `hyperparallel doctor --calibrate`."""
