"""Peephole rewrites of one rank's program: the same result from fewer and cheaper calls."""
