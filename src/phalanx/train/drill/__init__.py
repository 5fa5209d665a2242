"""Faults injected on purpose into a real run, and the proof of what happened."""
