"""Run a derived program: eager calls, whole steps, virtual ranks, launch and checkpoints.

The public names are those of the top package; they stand in modules of the same names here.
"""
