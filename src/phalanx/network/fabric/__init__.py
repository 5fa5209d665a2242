"""Fabrics: which switches and cables join N network ports, what they cost, and what a failure takes away."""
