"""Checkpoints: saved in the background, whole or not at all, for any layout."""
