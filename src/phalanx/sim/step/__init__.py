"""Simulate one step of a plan on a fabric, as a timeline."""
