"""Facts about the data of a configuration that this machine can see: sources named, sources missing, and tokens."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.io.path_probes import is_folder, path_exists
from phalanx.job.dataset import read_manifest

# Megatron's index of a dataset: magic, version, code of the token type (core/datasets/indexed_dataset.py).
INDEX_MAGIC = b"MMIDIDX\x00\x00"
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
# Tokens of corpora that are named and not given as a path: T5 paper (arXiv:1910.10683) for C4; the test file that
# torchtitan ships has 2,000 documents of C4, about 0.9 million tokens.
NAMED_TOKENS: Mapping[str, float] = {"c4": 156e9, "c4_test": 0.9e6, "c4_validation": 0.17e9}
MOST_SOURCES = 1000

MOST_LISTED = 10_000  # entries of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """The data sources of a configuration; `tokens` is None unless the tokens of all of them are known."""

    named: int
    missing: tuple[str, ...] = ()
    tokens: float | None = None
    setting: str = ""  # the setting that names the data, in another trainer's file


def folder_facts(paths: Sequence[str], base: Path) -> DataFacts:
    """Return the facts for folders made by `phalanx data build`.

    A folder that does not exist yet is not counted as missing: `plan` and `train` report it.
    """
    tokens, is_counted = 0.0, bool(paths)
    for name in paths[:MOST_SOURCES]:
        try:
            tokens += sum(shard.tokens for shard in read_manifest(base / name).shards if shard.split == "train")
        except (PhalanxError, OSError, ValueError):
            is_counted = False
    return DataFacts(named=len(paths), tokens=tokens if is_counted else None)


def megatron_facts(words: Sequence[str], base: Path, *, setting: str) -> DataFacts:
    """Return the facts for Megatron's `--data-path`: prefixes of .bin and .idx files; weights are ignored.

    A prefix counts as missing only if its folder exists on this machine and holds data: configurations are often
    checked far from their data, and a script may fetch the data later.
    """
    prefixes = [word for word in words if word and not _is_number(word)][:MOST_SOURCES]
    missing, tokens, is_counted = [], 0.0, bool(prefixes)
    for prefix in prefixes:
        # A prefix with a shell variable cannot be resolved here.
        count = _megatron_tokens(base / prefix) if "$" not in prefix else None
        is_counted = is_counted and count is not None
        tokens += count or 0.0
        if "$" not in prefix and _is_absent(base / prefix):
            missing.append(prefix)
    return DataFacts(
        named=len(prefixes), missing=tuple(missing), tokens=tokens if is_counted else None, setting=setting
    )


def named_facts(name: str, *, setting: str) -> DataFacts:
    """Return the facts for a corpus given by name."""
    return DataFacts(named=1, tokens=NAMED_TOKENS.get(name.lower()), setting=setting)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_absent(prefix: Path) -> bool:
    try:
        files = [Path(f"{prefix}.bin"), prefix]
        if any(path_exists(file) for file in files) or not is_folder(prefix.parent):
            return False
        return any(file.suffix in (".bin", ".idx") for file in islice(prefix.parent.iterdir(), MOST_LISTED))
    except (OSError, ValueError):
        return False


def _megatron_tokens(prefix: Path) -> float | None:
    """Return the tokens of a Megatron dataset, or None without its files.

    They are the size of the .bin file over the bytes of a token, whose type the .idx file states.
    """
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            head = file.read(len(INDEX_MAGIC) + 9)
        if not head.startswith(INDEX_MAGIC) or len(head) < len(INDEX_MAGIC) + 9:
            return None
        _, code = struct.unpack_from("<QB", head, len(INDEX_MAGIC))
        return Path(f"{prefix}.bin").stat().st_size / TOKEN_BYTES[code] if code in TOKEN_BYTES else None
    except (OSError, ValueError):
        return None
