"""Simulation: traffic on fabrics, a step of a plan on a fabric, and months of a run with failures."""
