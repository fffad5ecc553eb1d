"""Regions: the user's own per-rank code inside a program that is otherwise derived."""
