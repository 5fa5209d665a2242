"""Starts the ranks of a run on this machine, watches them, and says in one message what went wrong."""
