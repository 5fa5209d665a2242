"""Traces of a training step: messages, FLOPs and memory of a rank, on real ranks or on one CPU for thousands."""
