"""Results as notebooks show them: tables as data frames, pages as HTML, and a one-line repr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any


def as_frame(columns: Mapping[str, Sequence[object]], *, index: str = "") -> Any:
    """A DataFrame with `index` as its index, or the arrays by name; pandas is never required.

    >>> "loss" in as_frame({"step": [0, 1], "loss": [2.5, None]}, index="step")
    True
    """
    import numpy as np

    # None in a column of numbers is a value that is not known, which numpy and pandas both write as NaN.
    arrays = {
        name: np.array([np.nan if one is None else one for one in values], dtype=_dtype(values))
        for name, values in columns.items()
    }
    if find_spec("pandas") is None:
        return arrays
    import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]

    frame = pandas.DataFrame(arrays)
    return frame.set_index(index) if index else frame


def _dtype(values: Sequence[object]) -> Any:
    """Whole numbers stay whole; texts and mixtures are objects."""
    known = [one for one in values if one is not None]
    if all(isinstance(one, bool) for one in known) and len(known) == len(values):
        return bool
    if all(isinstance(one, int) for one in known) and len(known) == len(values):
        return "int64"
    return float if all(isinstance(one, int | float) for one in known) else object


def one_line_repr(value: object, page: str) -> str:
    """The kind of a result and the first line of its page.

    >>> one_line_repr(3, "three\\nlines")
    '<int: three>'
    """
    first = next((line.strip() for line in page.splitlines() if line.strip()), "")
    return f"<{type(value).__name__}: {first[:100]}{'…' * (len(first) > 100)}>"


def text_as_html(page: str) -> str:
    """A page of the terminal in its own columns."""
    return f"<pre>{escape(page)}</pre>"


def document_as_html(document: str, *, height: int = 600) -> str:
    """A whole HTML file inside a cell, with styles of its own and no way to reach the notebook around it."""
    return (
        f'<iframe sandbox srcdoc="{escape(document, quote=True)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )
