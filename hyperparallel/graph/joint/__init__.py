"""Exact rewrites of the joint graph, the last steps of a capture: every value stays equal bit for bit."""
