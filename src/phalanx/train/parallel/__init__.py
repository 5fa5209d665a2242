"""Techniques of splitting a model over ranks, one file per technique; `parallelize.py` applies them in order."""
