"""Documents from files: text, JSON lines and Parquet, plain or gzipped, one at a time in bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.files import read_failure
from phalanx.io.path_probes import is_file, is_folder

# A longer document is split at a line end: it must fit in memory to be hashed
LONGEST_BYTES = 16 << 20
LONGEST_LINE_BYTES = 64 << 20
HEAD_BYTES = 8 << 10
# Share of undecodable characters in the head above which a file is not text
MOST_BAD_HEAD = 0.3
PARQUET_ROWS = 256

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
LINES_ENDINGS = (".jsonl", ".ndjson")
SPLIT_ON = ("file", "blank", "line", "formfeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One document as read, or the place of a missing one (`text` is None and `fault` gives the reason)."""

    text: str | None
    read_bytes: int  # bytes of the file on disk
    bad_utf8: int = 0
    cut: bool = False
    fault: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Options of reading: the field that holds the text, and the separator of documents in a text file."""

    field: str = "text"
    split_on: str = "file"


def kind_of(path: Path) -> str:
    """Return "text", "lines", "parquet", or "" for a file that is skipped when a folder is read.

    >>> kind_of(Path("a/part-0.jsonl.gz")), kind_of(Path("b.bin"))
    ('lines', '')
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet") and name == path.name.lower():
        return "parquet"
    return "text" if name.endswith(TEXT_ENDINGS) else "lines" if name.endswith(LINES_ENDINGS) else ""


def list_files(source: Path) -> tuple[list[Path], int]:
    """Return the files of a source, sorted, and the number of files that are skipped."""
    try:
        if not is_folder(source):
            source.stat()
            return [source], 0
        visible = (
            path
            for path in source.rglob("*")
            if not any(name.startswith(".") for name in path.relative_to(source).parts) and is_file(path)
        )
        all_files = sorted(visible)
    except FileNotFoundError:
        raise mistake(str(source), "does not exist", fix="name a text, .jsonl or .parquet file, or a folder") from None
    except OSError as error:
        raise read_failure(source, error) from error
    files = [path for path in all_files if kind_of(path)]
    if not files:
        endings = ", ".join((*TEXT_ENDINGS, *LINES_ENDINGS, ".parquet"))
        problem = f"holds no text: none of its {len(all_files):,} files ends in {endings} (or .gz of those)"
        raise mistake(str(source), problem, fix="name the files themselves: a named file of any other ending is text")
    return files, len(all_files) - len(files)


def read_records(path: Path, reading: Reading) -> Iterator[Record]:
    """Yield every document of a file in order; raise UserError if the file does not have the format of its name."""
    reader = {"lines": _read_lines, "parquet": _read_parquet}.get(kind_of(path), _read_text)
    try:
        yield from reader(path, reading)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"is damaged: {error}"
        raise mistake(
            str(path), problem, why="the rest of it cannot be read", fix="copy it again (gzip -t tests it)"
        ) from None
    except OSError as error:
        raise read_failure(path, error) from error


class _FileStream:
    """A file read as bytes, unpacked if gzipped, that tracks how much of the file on disk has been read."""

    def __init__(self, path: Path) -> None:
        self.raw = path.open("rb")
        packed = path.name.lower().endswith(".gz")
        self.bytes: IO[bytes] = gzip.GzipFile(fileobj=self.raw) if packed else self.raw  # type: ignore[assignment]
        self.seen = 0

    def advance(self) -> int:
        """Return the bytes of the file read since the last call."""
        position = self.raw.tell()
        last_position, self.seen = self.seen, position
        return position - last_position

    def __enter__(self) -> _FileStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes.close()
        self.raw.close()


def _read_text(path: Path, reading: Reading) -> Iterator[Record]:
    with _FileStream(path) as stream:
        head = stream.bytes.read(HEAD_BYTES)
        _check_text(path, head)
        head = head.removeprefix(b"\xef\xbb\xbf")
        for data, cut in _SPLITTERS[reading.split_on](_Buffered(head, stream.bytes)):
            text, num_bad = decode_text(data)
            yield Record(text=text, read_bytes=stream.advance(), bad_utf8=num_bad, cut=cut)


def _check_text(path: Path, head: bytes) -> None:
    fix = "name text, .jsonl or .parquet files"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        fix = f"convert it: iconv -f UTF-16 -t UTF-8 {path.name}"
        raise mistake(str(path), "is UTF-16, not UTF-8", fix=fix)
    text, num_bad = decode_text(head)
    if b"\0" in head or num_bad > MOST_BAD_HEAD * max(1, len(text)):
        why = f"{head.count(0):,} zero bytes and {num_bad:,} undecodable ones in its first {len(head):,}"
        raise mistake(str(path), "is not text", why=why, fix=fix)


def decode_text(data: bytes) -> tuple[str, int]:
    """Decode UTF-8; return the text, with U+FFFD for undecodable bytes, and the number of replacements."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count("�") - data.count("�".encode())


class _Buffered:
    """A stream with its first bytes, already read, put back at the front."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self.head, self.stream = head, stream

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; fewer only at the end."""
        head, self.head = self.head[:size], self.head[size:]
        return head + self.stream.read(size - len(head)) if len(head) < size else head

    def readline(self, size: int) -> bytes:
        """Read to the end of the line, or `size` bytes."""
        at = self.head.find(b"\n", 0, size)
        if at >= 0:
            return self.read(at + 1)
        return self.read(size) if len(self.head) >= size else self._rest_of_head() + self.stream.readline(size)

    def _rest_of_head(self) -> bytes:
        head, self.head = self.head, b""
        return head


# Bytes of a document, and whether they are only a part of one
Pieces = Iterator[tuple[bytes, bool]]


def _whole_files(stream: _Buffered) -> Pieces:
    carry, cut = b"", False
    while data := carry + stream.read(LONGEST_BYTES - len(carry)):
        if len(data) < LONGEST_BYTES:
            yield data, cut
            return
        end = data.rfind(b"\n") + 1 or _whole_characters(data)
        cut, carry = True, data[end:]
        yield data[:end], cut


def _line_blocks(ends: Callable[[bytes], bool], *, keep: bool) -> Callable[[_Buffered], Pieces]:
    """Return a splitter of documents that end with a line for which `ends` holds.

    `keep` leaves that line in the document.
    """

    def split(stream: _Buffered) -> Pieces:
        lines: list[bytes] = []
        size, cut = 0, False
        while line := stream.readline(LONGEST_BYTES):
            if ends(line):
                lines += [line] if keep else []
                if lines:
                    yield b"".join(lines), cut
                lines, size, cut = [], 0, False
                continue
            if size + len(line) > LONGEST_BYTES and lines:
                yield b"".join(lines), True
                lines, size, cut = [], 0, True
            lines.append(line)
            size += len(line)
        if lines:
            yield b"".join(lines), cut

    return split


def _formfeed_pieces(stream: _Buffered) -> Pieces:
    carry = b""
    while data := stream.read(HEAD_BYTES):
        *documents, carry = (carry + data).split(b"\f")
        yield from ((document, False) for document in documents)
        if len(carry) > LONGEST_BYTES:
            end = carry.rfind(b"\n") + 1 or _whole_characters(carry)
            yield carry[:end], True
            carry = carry[end:]
    if carry:
        yield carry, False


_SPLITTERS: dict[str, Callable[[_Buffered], Pieces]] = {
    "file": _whole_files,
    "blank": _line_blocks(lambda line: not line.strip(), keep=False),
    "line": _line_blocks(lambda line: line.endswith(b"\n"), keep=True),
    "formfeed": _formfeed_pieces,
}


def _whole_characters(data: bytes) -> int:
    """Return the length of `data` without an unfinished character at its end."""
    for distance in range(1, 4):
        if data[-distance] >= 0xC0:
            return len(data) - distance
        if data[-distance] < 0x80:
            break
    return len(data)


def _read_lines(path: Path, reading: Reading) -> Iterator[Record]:
    with _FileStream(path) as stream:
        number = 0
        while line := stream.bytes.readline(LONGEST_LINE_BYTES):
            number += 1
            yield _record_of_line(line, f"{path}:{number}", reading.field, stream.advance())


def _record_of_line(line: bytes, where: str, field: str, read_bytes: int) -> Record:
    data, num_bad = decode_text(line)
    if not data.strip():
        return Record(text="", read_bytes=read_bytes)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return Record(text=None, read_bytes=read_bytes, fault=f"{where}: is not JSON")
    if not isinstance(value, dict):
        return Record(text=None, read_bytes=read_bytes, fault=f"{where}: is not an object with fields")
    text = value.get(field)
    if not isinstance(text, str):
        fault = f'{where}: has no text in "{field}"; its fields are {", ".join(map(str, value)) or "none"}'[:300]
        return Record(text=None, read_bytes=read_bytes, fault=fault)
    text, num_surrogates = _without_surrogates(text)
    return Record(text=text, read_bytes=read_bytes, bad_utf8=num_bad + num_surrogates)


def _without_surrogates(text: str) -> tuple[str, int]:
    """Replace lone surrogates, which JSON may contain ("\\ud800") but UTF-8 cannot; return the number replaced."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return replaced, max(1, replaced.count("�") - text.count("�"))


def _read_parquet(path: Path, reading: Reading) -> Iterator[Record]:
    table = _open_parquet(path)
    columns: list[str] = table.schema_arrow.names
    if reading.field not in columns:
        fix = f"name one of its columns with --field: {', '.join(columns)}"[:300]
        raise mistake(str(path), f'has no column "{reading.field}"', fix=fix)
    with table:
        rows = max(1, table.metadata.num_rows)
        per_row = path.stat().st_size / rows
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[reading.field]):
            yield from _records_of_rows(path, reading.field, batch.column(0).to_pylist(), per_row)


def _records_of_rows(path: Path, field: str, values: Iterable[object], per_row: float) -> Iterator[Record]:
    for value in values:
        if isinstance(value, str):
            yield Record(text=value, read_bytes=round(per_row))
        else:
            fault = f'{path}: has a row with {"nothing" if value is None else type(value).__name__} in "{field}"'
            yield Record(text=None, read_bytes=round(per_row), fault=fault)


def _open_parquet(path: Path) -> Any:
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        reason = "reading Parquet needs pyarrow"
        raise UserError(Problem(where=str(path), what=reason, fix="pip install 'phalanx[parquet]'")) from error
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        problem = f"is not Parquet: {str(error).splitlines()[0][:120]}"
        raise mistake(str(path), problem, fix="write it again, or give it the ending it deserves") from error
