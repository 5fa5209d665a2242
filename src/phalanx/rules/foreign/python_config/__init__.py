"""Configurations that are Python programs, read from their syntax tree: nothing of them is run."""
