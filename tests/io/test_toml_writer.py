"""A resolved job as TOML means the same job."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict, load

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_survives(path: Path, tmp_path: Path) -> None:
    job = load(path).job
    copy = tmp_path / "job.toml"
    copy.write_text(to_toml(job_to_dict(job)), encoding="utf-8")
    assert load(copy).job == job


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), SCALARS | st.lists(SCALARS)))
def test_any_values_survive(values: dict[str, object]) -> None:
    try:
        text = to_toml({"name": "x", "section": values})
        text.encode()
    except UnicodeEncodeError:  # lone surrogates are no text
        return
    assert tomllib.loads(text).get("section", {}) == values
