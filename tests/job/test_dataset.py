"""Manifests of datasets as strangers may write them: read or refused, never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import UserError
from phalanx.job.dataset import read_manifest

SHARD = {
    **dict.fromkeys(("sha256", "index_sha256"), ""),
    "file": "a.bin",
    "split": "train",
    "tokens": 5,
    "documents": 1,
    "text_bytes": 9,
}
TALLY = dict.fromkeys(("records", "documents", "empty", "missing", "bad_utf8", "cut"), 0)
SOURCE = {"name": "a", "path": "a", "weight": 1, "licence": "", "tally": TALLY, "shards": [SHARD]}
WHOLE = {
    "format": 1,
    "phalanx": "0",
    "vocab": 9,
    "dtype": "uint16",
    "end_of_text": 0,
    "tokenizer_sha256": "",
    "heldout": 0.1,
    "split_on": "file",
    "sources": [SOURCE],
}


def source(**changes: Any) -> dict[str, Any]:
    return {"sources": [{**SOURCE, **changes}]}


def shard(**changes: Any) -> dict[str, Any]:
    return source(shards=[{**SHARD, **changes}])


def test_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(WHOLE))
    assert read_manifest(tmp_path).total("tokens", "train") == 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vocab": "9"}, "has a vocabulary or a count of tokens or documents that is no whole number"),
        (shard(tokens=-1), "has a vocabulary or a count of tokens or documents that is no whole number"),
        ({"dtype": "float64"}, "has a digest or a type of tokens that is none"),
        (source(weight="2"), "gives a source the weight '2'"),
        (source(weight=0), "gives a source the weight '0'"),
        (shard(file="../../secret.bin"), "names a shard '../../secret.bin', and only files of its own folder are read"),
        (shard(file="/etc/passwd"), "names a shard '/etc/passwd', and only files of its own folder are read"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({**WHOLE, **change}))
    with pytest.raises(UserError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).splitlines()[0] == f"{tmp_path / 'manifest.json'}: {told}"


def test_one_that_nests_without_end(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(UserError) as caught:
        read_manifest(tmp_path)
    assert "manifest.json: is not JSON: " in str(caught.value)
