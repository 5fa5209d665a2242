"""Recipes under data/ are read, never imported."""

collect_ignore = ["data"]
