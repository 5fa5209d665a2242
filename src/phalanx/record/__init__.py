"""Run folders, the events of their ranks, and the reports made from them. Does not import torch."""
