"""Building: what goes in comes out, on the right side, whole or not at all, and on from where it was killed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import PhalanxError, SystemFailure, UserError
from phalanx.job.dataset import DatasetManifest, read_manifest, verify_dataset
from phalanx.train.data import fetch
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset, held_out
from phalanx.train.data.fetch import only_builder
from phalanx.train.data.token_samples import TokenDataset
from phalanx.train.data.tokenizer import load_tokenizer

from .conftest import Make, silent, story, write_lines


def documents(folder: Path, split: str) -> list[str]:
    """The texts of a split, cut at the ends of text."""
    dataset = TokenDataset.open(folder, split)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    found = []
    for run in dataset.tokens(dataset.num_tokens):
        assert run[-1] == dataset.end_of_text
        cuts = np.flatnonzero(run == dataset.end_of_text)
        found += [tokenizer.decode(part[part != dataset.end_of_text]) for part in np.split(run, cuts)[:-1]]
    return found


def test_every_document_comes_out_on_its_side(dataset: Path) -> None:
    expected = [story(number) for number in range(1000)]
    kept = [text for text in expected if held_out(text, 0.1)]
    assert 50 < len(kept) < 150
    assert documents(dataset, "heldout") == kept
    assert documents(dataset, "train") == [text for text in expected if not held_out(text, 0.1)]


def test_the_manifest_counts_exactly(dataset: Path) -> None:
    manifest = verify_dataset(dataset).manifest
    assert len([shard for shard in manifest.shards if shard.split == "train"]) > 3
    kept = [story(number) for number in range(1000) if held_out(story(number), 0.1)]
    assert manifest.total("documents", "heldout") == len(kept)
    assert manifest.total("text_bytes", "heldout") == sum(len(text.encode()) for text in kept)
    heldout = TokenDataset.open(dataset, "heldout")
    assert heldout.bytes_per_token == manifest.total("text_bytes", "heldout") / manifest.total("tokens", "heldout")
    assert manifest.sources[0].tally.records == manifest.sources[0].tally.documents == 1000


def test_the_index_finds_every_document(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    tokenizer = load_tokenizer(dataset / "tokenizer.json")
    shard = next(shard for shard in manifest.shards if shard.split == "train")
    tokens = np.fromfile(dataset / shard.file, dtype="<u2")
    ends = np.fromfile(dataset / shard.index_file, dtype="<i8").reshape(-1, 2)
    assert ends[-1].tolist() == [shard.tokens, shard.text_bytes]
    starts = np.concatenate([[[0, 0]], ends[:-1]])
    for (start, text_start), (end, text_end) in list(zip(starts, ends, strict=True))[:20]:
        assert tokens[end - 1] == manifest.end_of_text
        text = tokenizer.decode(tokens[start : end - 1].astype(np.int64))
        assert len(text.encode()) == text_end - text_start


def test_the_split_does_not_depend_on_order_or_source(tmp_path: Path, make: Make) -> None:
    one = write_lines(tmp_path / "one.jsonl", range(300))
    two = write_lines(tmp_path / "two.jsonl", range(150, 300))
    three = tmp_path / "three.jsonl"
    three.write_text("".join(reversed(one.read_text().splitlines(keepends=True)[:150])))
    make(tmp_path / "a", one, heldout=0.2)
    make(tmp_path / "b", (two, 2.0), three, heldout=0.2)
    assert sorted(documents(tmp_path / "a", "heldout")) == sorted(documents(tmp_path / "b", "heldout"))
    first, second = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert first.tokenizer_sha256 == second.tokenizer_sha256, "the sample is chosen by hash as well"


def test_the_same_call_gives_the_same_bytes(tmp_path: Path, make: Make, lines: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name, lines, shard_tokens=5000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_given_tokenizer_is_kept_as_it_is(tmp_path: Path, make: Make, dataset: Path) -> None:
    given = dataset / "tokenizer.json"
    other = write_lines(tmp_path / "other.jsonl", range(2000, 2100))
    manifest = make(tmp_path / "out", other, tokenizer=given)
    assert manifest.tokenizer_sha256 == read_manifest(dataset).tokenizer_sha256
    together = TokenDataset.open([dataset, tmp_path / "out"], "train")
    assert together.num_tokens == TokenDataset.open(dataset, "train").num_tokens + manifest.total("tokens", "train")


def test_a_large_vocabulary_is_stored_wide(tmp_path: Path, make: Make, dataset: Path) -> None:
    raw = json.loads((dataset / "tokenizer.json").read_text())
    # A token above 65,535, as a vocabulary with a hole has it: the whole vocabulary decides the width.
    word, number = max(raw["model"]["vocab"].items(), key=lambda item: item[1])
    raw["model"]["vocab"][word] = 70_000
    (tmp_path / "wide.json").write_text(json.dumps(raw))
    source = write_lines(tmp_path / "a.jsonl", range(300))
    manifest = make(tmp_path / "out", source, tokenizer=tmp_path / "wide.json")
    assert (manifest.dtype, manifest.vocab) == ("uint32", 70_001)
    tokens = np.concatenate(TokenDataset.open(tmp_path / "out", "train").tokens(10**6))
    assert number not in tokens
    assert documents(tmp_path / "out", "train") == [story(number) for number in range(300)]


KILLED = """
import sys
from pathlib import Path
from phalanx.train.data import build_dataset as module
from phalanx.train.data.build_dataset import TextOrigin, Recipe, build_dataset
from phalanx.train.data.progress import BuildProgress
module.BATCH_BYTES = 4000
slow = len(sys.argv) > 3
if slow:
    import time
    add = module._Chunk.add
    def slowly(self, *args):
        time.sleep(0.02)
        add(self, *args)
    module._Chunk.add = slowly
recipe = Recipe(origins=tuple(TextOrigin(path=Path(p)) for p in sys.argv[2].split(",")), vocab=300, heldout=0.1,
                shard_tokens=3000)
build_dataset(recipe, Path(sys.argv[1]), lambda total: BuildProgress(sys.stderr, total))
"""


@pytest.mark.slow
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    sources = ",".join(
        str(write_lines(tmp_path / f"{name}.jsonl", numbers))
        for name, numbers in (("a", range(400)), ("b", range(400, 1400)))
    )
    command = [sys.executable, "-c", KILLED]
    subprocess.run([*command, str(tmp_path / "whole"), sources], check=True, capture_output=True)
    partial, kills, texts = tmp_path / ".out.partial", 0, []
    for wanted in (5, 18):  # shards on disk when the signal comes: once in each source
        process = subprocess.Popen(
            [*command, str(tmp_path / "out"), sources, "slow"], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 300
        while len(list(partial.glob("*.bin"))) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        texts.append(process.communicate()[1])
        assert not (tmp_path / "out").exists(), "nothing is published before it is whole"
    assert kills == 2
    done = subprocess.run([*command, str(tmp_path / "out"), sources], check=True, capture_output=True, text=True)
    going_on = re.findall(r"going on after ([\d,]+) tokens", texts[1] + done.stderr)
    before = [int(text.replace(",", "")) for text in going_on]
    assert len(before) == 2
    assert 0 < before[0] < before[1], "each start keeps what the one before finished"
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not partial.exists()
    assert verify_dataset(tmp_path / "out").manifest.sources[1].tally.documents == 1000


def test_changed_sources_start_over(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", range(400))
    unfinished(tmp_path, source, monkeypatch)
    assert list((tmp_path / ".out.partial").glob("*.bin"))
    write_lines(source, range(100, 200))
    make(tmp_path / "out", source, shard_tokens=2000)
    assert sorted(documents(tmp_path / "out", "train")) == sorted(story(number) for number in range(100, 200))


def unfinished(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a build behind that stopped when its third shard was done."""

    class Stop(Exception):
        pass

    def save(work: object, source: object, *, complete: bool) -> None:
        original(work, source, complete=complete)  # type: ignore[arg-type]
        if len(source.shards) == 3:  # type: ignore[attr-defined]
            raise Stop

    from phalanx.train.data import build_dataset as module

    original = module._Work._save_state
    with monkeypatch.context() as patch:
        patch.setattr(module, "BATCH_BYTES", 2000)
        patch.setattr(module._Work, "_save_state", save)
        with pytest.raises(Stop):
            build_dataset(
                Recipe(origins=(TextOrigin(path=source),), vocab=300, heldout=0.0, shard_tokens=2000),
                tmp_path / "out",
                silent,
            )


def test_a_damaged_state_starts_over(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", range(400))
    unfinished(tmp_path, source, monkeypatch)
    (tmp_path / ".out.partial" / "progress.json").write_text('{"fingerprint": ')
    make(tmp_path / "out", source)
    assert len(documents(tmp_path / "out", "train")) == 400


def failed(kind: type[PhalanxError], make: Make, *arguments: object, **options: object) -> str:
    with pytest.raises(kind) as caught:
        make(*arguments, **options)
    return str(caught.value)


def test_bad_calls_are_all_named_at_once(tmp_path: Path, make: Make, lines: Path) -> None:
    message = failed(
        UserError, make, tmp_path / "out", (lines, 0.0), (lines, float("nan")), vocab=10, heldout=1.5, split_on="blnk"
    )
    assert message == (
        f"{lines}: has the weight 0\n"
        "  a source is seen in proportion to its weight\n"
        "  use a number above 0, or leave the source out\n"
        f"{lines}: has the weight nan\n"
        "  a source is seen in proportion to its weight\n"
        "  use a number above 0, or leave the source out\n"
        f"{lines}: is given twice\n"
        f"  use {lines}=2 to see it twice as often\n"
        "--heldout: 1.5 is not a share to hold out\n"
        "  use 0 to 0.5; 0.01 is usual\n"
        "--vocab: 10 is out of range\n"
        "  257 are the bytes and the end of text\n"
        "  use 257 to 1,048,576\n"
        '--split-on: "blnk" is unknown\n'
        "  use blank"
    )
    assert failed(UserError, make, tmp_path / "out") == (
        "SOURCE: none is given\n  name files or folders, or use --corpus offline-english"
    )


def test_what_is_there_is_never_changed(tmp_path: Path, make: Make, dataset: Path, lines: Path) -> None:
    assert failed(UserError, make, dataset, lines) == (
        f"{dataset}: already holds a dataset\n  a build never changes what is there\n"
        "  remove it, or name another folder"
    )
    (tmp_path / "file").write_text("x")
    assert failed(UserError, make, tmp_path / "file", lines).startswith(f"{tmp_path}/file: already exists\n")


def test_empty_sources(tmp_path: Path, make: Make) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n \n")
    for name in ("empty.txt", "blank.txt"):
        assert failed(UserError, make, tmp_path / "out", tmp_path / name) == (
            f"{tmp_path}/{name}: no document is left to train on\n"
            "  all are empty, missing or held out\n"
            "  look at the sources, or cut them in more documents with --split-on blank"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [False, True])
def test_a_misspelt_field_is_said_early(tmp_path: Path, make: Make, dataset: Path, given: bool) -> None:
    rows = [{"body": "x"} if number % 4 == 0 else {"text": story(number)} for number in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"tokenizer": dataset / "tokenizer.json"} if given else {}
    message = failed(UserError, make, tmp_path / "out", tmp_path / "a.jsonl", **options)
    assert message.startswith(f'{tmp_path}/a.jsonl: 26 of 101 records have no text in "text"\n  such as ')
    assert message.endswith("its fields are body\n  name the field that holds the text with --field")


def test_a_few_lines_without_text_are_counted(tmp_path: Path, make: Make) -> None:
    rows = [{"body": "x"} if number % 50 == 0 else {"text": story(number)} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n \n")
    tally = make(tmp_path / "out", tmp_path / "a.jsonl").sources[0].tally
    assert (tally.records, tally.documents, tally.missing, tally.empty) == (202, 196, 4, 2)


def test_a_full_disk(tmp_path: Path, make: Make, lines: Path, dataset: Path) -> None:
    """The limit on file size is the nearest to a full disk that a test may cause."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tokenizer = dataset / "tokenizer.json"
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        message = failed(SystemFailure, make, tmp_path / "out", lines, tokenizer=tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith(f"{tmp_path}/out: cannot be written: File too large\n  ")
    assert message.endswith("finished shards are kept: make room and run the same command, which resumes")
    assert not (tmp_path / "out").exists()
    assert make(tmp_path / "out", lines, tokenizer=tokenizer).total("documents", "train") == 1000


def test_a_folder_that_cannot_be_written(tmp_path: Path, make: Make, lines: Path) -> None:
    (tmp_path / "file").write_text("x")
    message = failed(SystemFailure, make, tmp_path / "file" / "out", lines)
    assert message.startswith(f"{tmp_path}/file/out: cannot be written: ")


def test_two_builders_of_one_folder(tmp_path: Path, make: Make, lines: Path) -> None:
    out = tmp_path / "out"
    with only_builder(out, wait_s=0):
        message = failed(SystemFailure, make, out, lines)
    assert message == (
        f"{out}: another process is building it (it holds .out.lock)\n  wait for it, or build into another folder"
    )
    make(out, lines)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_a_lock_left_by_a_killed_process_does_not_hold(tmp_path: Path) -> None:
    code = "import os,sys,pathlib\nfrom phalanx.train.data.fetch import only_builder\n"
    code += "with only_builder(pathlib.Path(sys.argv[1]), wait_s=0): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert (tmp_path / ".out.lock").exists()
    with only_builder(tmp_path / "out", wait_s=0):
        pass


def test_a_lock_removed_while_we_took_it_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".out.lock"

    def late(handle: int, how: int) -> None:
        path.unlink()  # the builder before us is done
        path.touch()  # and another has begun
        flock(handle, how)

    flock = fetch.fcntl.flock
    monkeypatch.setattr(fetch.fcntl, "flock", late)
    with pytest.raises(SystemFailure, match="another process is building it"), only_builder(tmp_path / "out", wait_s=0):
        pass


def test_weights_and_licences_are_kept(tmp_path: Path, lines: Path) -> None:
    origins = (TextOrigin(path=lines, weight=2.5, licence="CC0", name="stories"),)
    build_dataset(Recipe(origins=origins, vocab=300), tmp_path / "out", silent)
    (source,) = read_manifest(tmp_path / "out").sources
    assert (source.name, source.weight, source.licence) == ("stories", 2.5, "CC0")


def test_the_manifest_reads_back_as_it_was(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    assert isinstance(manifest, DatasetManifest)
    assert manifest.dump() == (dataset / "manifest.json").read_text()
