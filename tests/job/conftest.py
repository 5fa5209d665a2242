"""A job file in a folder of its own, as most tests of the loader need one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.job.load import load

Complaints = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write job.toml and move there, so that messages say job.toml and not a temporary path."""
    monkeypatch.chdir(tmp_path)

    def write_job(text: str) -> Path:
        path = Path("job.toml")
        path.write_text(text, encoding="utf-8")
        return path

    return write_job


@pytest.fixture
def complaints(write: Callable[[str], Path]) -> Complaints:
    """The rendered mistakes of a job text."""

    def complain(text: str, *overrides: str) -> str:
        path = write(text)
        with pytest.raises(UserError) as caught:
            load(path, overrides=overrides)
        assert caught.value.exit_code == 2
        return str(caught.value)

    return complain
