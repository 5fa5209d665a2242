"""Columns as a pandas DataFrame where pandas is installed, else as numpy arrays by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def as_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """The columns as a DataFrame, or as a dict of arrays."""
    try:
        import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        import numpy as np

        return {name: np.array(values) for name, values in columns.items()}
    return pandas.DataFrame(dict(columns))
