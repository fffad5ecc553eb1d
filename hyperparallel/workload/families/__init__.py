"""Readers of published model configurations, one file for each kind of network."""
