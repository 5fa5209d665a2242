"""One file per technique of splitting a model, and `parallelize.py` with the order in which they are applied."""
