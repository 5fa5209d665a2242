"""The training step as a log: what a rank sends, computes and holds, on real ranks or on one CPU for thousands."""
