"""A real browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, for one module: while it runs, its event loop would be in the way of other modules'."""
    programs = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[dev]'")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    # --no-sandbox: in a container the tests are root, and the pages come from this machine alone.
    with programs.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: PHALANX_SCREENSHOTS, for a person to look at."""
    named = os.environ.get("PHALANX_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
