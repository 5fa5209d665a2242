"""Verify: read every byte of a checkpoint and compare it with what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from phalanx.train.state import names
from phalanx.train.state.catalog import Catalog, read_catalog
from phalanx.train.state.damage import Damaged, damaged
from phalanx.train.state.index import Index
from phalanx.train.state.manifest import Manifest
from phalanx.train.state.reading import Shard
from phalanx.train.state.url import Place

THREADS = 4  # sha256 runs at 1.1 GB/s a core here, below a fast disk: a few at once


def verify(folder: Place) -> Manifest:
    """The manifest, when all files are there and unchanged, no others are, and every tensor is whole; else Damaged."""
    catalog = read_catalog(folder)
    _check_names(catalog)
    problems = [problem for error in _errors(catalog) for problem in error.problems]
    if problems:
        raise Damaged(problems)
    return catalog.manifest


def _check_names(catalog: Catalog) -> None:
    ranks = range(catalog.manifest.world)
    wanted = {*map(names.data_name, ranks), *map(names.index_name, ranks)}
    here = catalog.parts.names() - {names.MANIFEST}
    for name in sorted(wanted - here):
        raise damaged(catalog.parts.place / name, "is missing")
    for name in sorted(here - wanted):
        raise damaged(catalog.parts.place / name, "does not belong to this checkpoint", fix="move it away")


def _errors(catalog: Catalog) -> list[Damaged]:
    def check(index: Index) -> Damaged | None:
        try:
            with Shard(catalog.parts, index) as shard:
                shard.check(index.entries)
        except Damaged as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        found = [error for error in pool.map(check, catalog.indexes) if error]
    return found + _holes(catalog)


def _holes(catalog: Catalog) -> list[Damaged]:
    found = []
    for stored in catalog.tensors.values():
        try:
            stored.check_whole()
        except Damaged as error:
            found.append(error)
    return found
