"""The results of a run: its time, money and energy, its stragglers and failures, measured next to predicted."""
