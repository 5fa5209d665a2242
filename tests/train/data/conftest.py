"""Small texts and datasets that several tests share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.job.dataset import DatasetManifest
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress

TEXT = "the ship sailed over a grey sea while nine sailors sang of home and bread"
WORDS = TEXT.split()


def story(number: int) -> str:
    """A document unlike every other."""
    return " ".join(WORDS[(number * 7 + place * (1 + number % 5)) % len(WORDS)] for place in range(40)) + f" {number}."


def write_lines(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps({"text": story(number)}) + "\n" for number in numbers), encoding="utf-8")
    return path


def silent(total: int) -> BuildProgress:
    return BuildProgress(io.StringIO(), total)


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand short documents."""
    return write_lines(tmp_path_factory.mktemp("lines") / "stories.jsonl", range(1000))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, lines: Path) -> Path:
    """Those documents as a dataset of several shards; tests must not change it."""
    out = tmp_path_factory.mktemp("built") / "stories"
    build_dataset(Recipe(origins=(TextOrigin(path=lines),), vocab=400, heldout=0.1, shard_tokens=12_000), out, silent)
    return out


Make = Callable[..., DatasetManifest]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(out, "a.txt", ("b.txt", 2.0), heldout=0.1, split_on="line") builds quietly."""

    def run(out: Path, *origins: Path | tuple[Path, float], **options: object) -> DatasetManifest:
        reading = Reading(**{key: options.pop(key) for key in ("field", "split_on") if key in options})  # type: ignore[arg-type]
        found = tuple(
            TextOrigin(path=one) if isinstance(one, Path) else TextOrigin(path=one[0], weight=one[1]) for one in origins
        )
        settings: dict[str, object] = {"vocab": 300, "heldout": 0.0, **options}
        return build_dataset(Recipe(origins=found, reading=reading, **settings), out, silent)  # type: ignore[arg-type]

    return run
