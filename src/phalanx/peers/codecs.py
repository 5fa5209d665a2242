"""Vectors as bytes and back."""

from __future__ import annotations


class Sender:
    """A codec with what it lost so far."""
