"""Measurements with their peers in the same run; results and commands stand in results/."""
