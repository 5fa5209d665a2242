"""Drills: inject faults on purpose into a real training run and judge from its records whether it recovered."""
