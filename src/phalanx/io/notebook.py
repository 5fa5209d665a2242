"""Results in notebooks: tables as data frames, pages as HTML, and a one-line repr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any


def as_frame(columns: Mapping[str, Sequence[object]], *, index: str = "") -> Any:
    """Return a DataFrame with `index` as its index, or the arrays by name if pandas is not installed.

    >>> "loss" in as_frame({"step": [0, 1], "loss": [2.5, None]}, index="step")
    True
    """
    import numpy as np

    # None in a column of numbers is an unknown value, which numpy and pandas represent as NaN.
    arrays = {
        name: np.array([np.nan if value is None else value for value in values], dtype=_dtype(values))
        for name, values in columns.items()
    }
    if find_spec("pandas") is None:
        return arrays
    import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]

    frame = pandas.DataFrame(arrays)
    return frame.set_index(index) if index else frame


def _dtype(values: Sequence[object]) -> Any:
    """Return the dtype of a column: integers stay integers; texts and mixtures are objects."""
    known_values = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in known_values) and len(known_values) == len(values):
        return bool
    if all(isinstance(value, int) for value in known_values) and len(known_values) == len(values):
        return "int64"
    return float if all(isinstance(value, int | float) for value in known_values) else object


def one_line_repr(value: object, page: str) -> str:
    """Return the type of a result and the first line of its page.

    >>> one_line_repr(3, "three\\nlines")
    '<int: three>'
    """
    first = next((line.strip() for line in page.splitlines() if line.strip()), "")
    return f"<{type(value).__name__}: {first[:100]}{'…' * (len(first) > 100)}>"


def text_as_html(page: str) -> str:
    """Return a page of terminal output as HTML with its columns aligned."""
    return f"<pre>{escape(page)}</pre>"


def document_as_html(document: str, *, height: int = 600) -> str:
    """Return a complete HTML document in a sandboxed frame: its styles and scripts cannot reach the notebook."""
    return (
        f'<iframe sandbox srcdoc="{escape(document, quote=True)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )
