"""Documents out of files of every kind, good and bad."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.train.data import documents
from phalanx.train.data.documents import Reading, Record, list_files, read_records


def texts(path: Path, **reading: str) -> list[str | None]:
    return [record.text for record in read_records(path, Reading(**reading))]


def records(path: Path, **reading: str) -> list[Record]:
    return list(read_records(path, Reading(**reading)))


@pytest.mark.parametrize(
    ("split_on", "expected"),
    [
        ("file", ["One.\nStill one.\n\n\nTwo\fhere.\n"]),
        ("blank", ["One.\nStill one.\n", "Two\fhere.\n"]),
        ("line", ["One.\n", "Still one.\n", "\n", "\n", "Two\fhere.\n"]),
        ("formfeed", ["One.\nStill one.\n\n\nTwo", "here.\n"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_is_split_as_asked(tmp_path: Path, split_on: str, expected: list[str], packed: bool) -> None:
    data = b"\xef\xbb\xbfOne.\nStill one.\n\n\nTwo\fhere.\n"
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    found = records(path, split_on=split_on)
    assert [record.text for record in found] == expected
    assert sum(record.read_bytes for record in found) <= path.stat().st_size


def test_text_longer_than_the_head_is_read_whole(tmp_path: Path) -> None:
    lines = [f"line {number} with some words in it\n" for number in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    assert texts(tmp_path / "a.txt") == ["".join(lines)]
    assert texts(tmp_path / "a.txt", split_on="line") == lines
    assert "".join(filter(None, texts(tmp_path / "a.txt", split_on="formfeed"))) == "".join(lines)


@pytest.mark.parametrize("split_on", ["file", "blank", "line", "formfeed"])
@pytest.mark.parametrize("line", ["word " * 30 + "\n", "äß€ " * 10, "é"])
def test_a_document_too_long_is_cut_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_on: str, line: str
) -> None:
    monkeypatch.setattr(documents, "LONGEST_BYTES", 10_001)
    text = line * (40_000 // len(line.encode()))
    (tmp_path / "a.txt").write_text(text)
    found = records(tmp_path / "a.txt", split_on=split_on)
    if split_on in ("file", "formfeed") or line.endswith("\n"):
        assert "".join(record.text or "" for record in found) == text
        assert sum(record.bad_utf8 for record in found) == 0
    if not (split_on == "line" and line.endswith("\n")):
        assert any(record.cut for record in found)
        assert max(len((record.text or "").encode()) for record in found) < 20_100


def test_bad_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    good = "A ship � at sea, and more words so that the file is text. " * 3
    (tmp_path / "a.txt").write_bytes(good.encode() + b"caf\xe9 na\xefve")
    (found,) = records(tmp_path / "a.txt")
    assert found.text == good + "caf� na�ve"
    assert found.bad_utf8 == 2


def test_lines(tmp_path: Path) -> None:
    rows = ['{"text": "one", "id": 1}', '{"body": "x"}', "", "not json", "[1]", '{"text": 3}', '{"text": "a\\ud800b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    found = records(tmp_path / "a.jsonl")
    assert [record.text for record in found] == ["one", None, "", None, None, None, "a�b"]
    assert found[-1].bad_utf8 == 1
    assert found[1].fault == f'{tmp_path}/a.jsonl:2: has no text in "text"; its fields are body'
    assert found[3].fault == f"{tmp_path}/a.jsonl:4: is not JSON"
    assert sum(record.read_bytes for record in found) == (tmp_path / "a.jsonl").stat().st_size


def test_deeply_nested_json_does_not_stop_the_build(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":' + "[" * 100_000)
    (found,) = records(tmp_path / "a.jsonl")
    assert found.text is None


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"body": [f"document {n}" for n in range(600)] + [None], "n": list(range(601))})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = records(tmp_path / "a.parquet", field="body")
    assert [record.text for record in found] == [f"document {n}" for n in range(600)] + [None]
    with pytest.raises(UserError) as caught:
        records(tmp_path / "a.parquet")
    assert str(caught.value) == (
        f'{tmp_path}/a.parquet: has no column "text"\n  name one of its columns with --field: body, n'
    )
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match=r"b\.parquet: is not Parquet: "):
        records(tmp_path / "b.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(documents, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError) as caught:
        records(tmp_path / "a.parquet")
    assert str(caught.value) == (
        f"{tmp_path}/a.parquet: reading Parquet needs pyarrow\n  pip install 'phalanx[parquet]'"
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", bytes(range(256)) * 40, "is not text\n  32 zero bytes and 4,096 undecodable ones in its first 8,192"),
        ("a.txt", b"\x90\xab\xcd" * 3000, "is not text\n  0 zero bytes and "),
        ("a.txt", "ship at sea".encode("utf-16"), "is UTF-16, not UTF-8\n  convert it: iconv -f UTF-16 -t UTF-8 a.txt"),
        ("a.txt.gz", gzip.compress(b"many words " * 5000)[:-100], "is damaged: "),
        ("a.jsonl.gz", b"not gzip at all", "is damaged: Not a gzipped file"),
    ],
)
def test_what_is_not_text_is_said_so(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        records(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path}/{name}: {message}")


def test_a_folder_is_read_in_order_without_what_is_not_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c.jsonl", "picture.png", ".hidden/x.txt", "a.rst.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, passed = list_files(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in files] == ["a/c.jsonl", "a/z.md", "a.rst.gz", "b.txt"]
    assert passed == 1


def test_missing_and_barren_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: does not exist\n  name a text, \.jsonl or "):
        list_files(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_text("x")
    with pytest.raises(UserError, match=r"holds no text: none of its 1 files ends in \.txt, "):
        list_files(tmp_path)


def test_a_named_file_of_any_ending_is_text(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("Everyone is permitted to copy.")
    assert texts(tmp_path / "LICENSE") == ["Everyone is permitted to copy."]


def test_json_strings_keep_their_characters(tmp_path: Path) -> None:
    text = "naïve 😀 \u2028 line\nnext"
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": text}) + "\n" + json.dumps({"text": text}, ensure_ascii=False)
    )
    assert texts(tmp_path / "a.jsonl") == [text, text]
