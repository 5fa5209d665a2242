"""Simulate months of a plan with failures: one run event by event, many runs as a forecast, and improvements."""
