"""Documents out of files: text, JSON lines and Parquet, plain or gzipped, one at a time in bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.path_probes import is_file, is_folder

LONGEST_BYTES = (
    16 << 20
)  # a longer document is cut at a line end: it must fit in memory to be hashed before it is split
LONGEST_LINE_BYTES = 64 << 20
HEAD_BYTES = 8 << 10
MOST_BAD_HEAD = 0.3  # share of undecodable characters in the head above which a file is not text
PARQUET_ROWS = 256

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
LINES_ENDINGS = (".jsonl", ".ndjson")
SPLIT_ON = ("file", "blank", "line", "formfeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One document as read, or the place of one that is missing (`text` is None and `fault` says why)."""

    text: str | None
    read_bytes: int  # of the file on disk
    bad_utf8: int = 0
    cut: bool = False
    fault: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How files are read: which field holds the text, and what separates the documents of a text file."""

    field: str = "text"
    split_on: str = "file"


def kind_of(path: Path) -> str:
    """ "text", "lines", "parquet" or "" for a file no folder is read for.

    >>> kind_of(Path("a/part-0.jsonl.gz")), kind_of(Path("b.bin"))
    ('lines', '')
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet") and name == path.name.lower():
        return "parquet"
    return "text" if name.endswith(TEXT_ENDINGS) else "lines" if name.endswith(LINES_ENDINGS) else ""


def list_files(source: Path) -> tuple[list[Path], int]:
    """The files of a source in an order that does not depend on the disk, and how many others were passed over."""
    try:
        if not is_folder(source):
            source.stat()
            return [source], 0
        visible = (
            path
            for path in source.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(source).parts) and is_file(path)
        )
        found = sorted(visible)
    except FileNotFoundError:
        raise mistake(str(source), "does not exist", fix="name a text, .jsonl or .parquet file, or a folder") from None
    except OSError as error:
        raise SystemFailure(Problem(where=str(source), what=f"cannot be read: {error.strerror or error}")) from error
    files = [path for path in found if kind_of(path)]
    if not files:
        endings = ", ".join((*TEXT_ENDINGS, *LINES_ENDINGS, ".parquet"))
        what = f"holds no text: none of its {len(found):,} files ends in {endings} (or .gz of those)"
        raise mistake(str(source), what, fix="name the files themselves: a named file of any other ending is text")
    return files, len(found) - len(files)


def read_records(path: Path, reading: Reading) -> Iterator[Record]:
    """Every document of a file, in order; raises UserError when the file is not what its name says."""
    read = {"lines": _read_lines, "parquet": _read_parquet}.get(kind_of(path), _read_text)
    try:
        yield from read(path, reading)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"is damaged: {error}"
        raise mistake(
            str(path), what, why="the rest of it cannot be read", fix="copy it again (gzip -t tests it)"
        ) from None
    except OSError as error:
        raise SystemFailure(Problem(where=str(path), what=f"cannot be read: {error.strerror or error}")) from error


class _FileStream:
    """A file read as bytes, unpacked if need be, that knows how much of the file on disk is behind it."""

    def __init__(self, path: Path) -> None:
        self.raw = path.open("rb")
        packed = path.name.lower().endswith(".gz")
        self.bytes: IO[bytes] = gzip.GzipFile(fileobj=self.raw) if packed else self.raw  # type: ignore[assignment]
        self.seen = 0

    def advance(self) -> int:
        """Bytes of the file since the last call."""
        here = self.raw.tell()
        before, self.seen = self.seen, here
        return here - before

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
            text, bad = decode_text(data)
            yield Record(text=text, read_bytes=stream.advance(), bad_utf8=bad, cut=cut)


def _check_text(path: Path, head: bytes) -> None:
    fix = "name text, .jsonl or .parquet files"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        fix = f"convert it: iconv -f UTF-16 -t UTF-8 {path.name}"
        raise mistake(str(path), "is UTF-16, not UTF-8", fix=fix)
    text, bad = decode_text(head)
    if b"\0" in head or bad > MOST_BAD_HEAD * max(1, len(text)):
        why = f"{head.count(0):,} zero bytes and {bad:,} undecodable ones in its first {len(head):,}"
        raise mistake(str(path), "is not text", why=why, fix=fix)


def decode_text(data: bytes) -> tuple[str, int]:
    """UTF-8 text, every undecodable byte sequence replaced by U+FFFD, and how many were."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count("�") - data.count("�".encode())


class _Buffered:
    """A stream with the head that was already read put back before it."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self.head, self.stream = head, stream

    def read(self, size: int) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        taken, self.head = self.head[:size], self.head[size:]
        return taken + self.stream.read(size - len(taken)) if len(taken) < size else taken

    def readline(self, size: int) -> bytes:
        """To the end of the line, or `size` bytes."""
        at = self.head.find(b"\n", 0, size)
        if at >= 0:
            return self.read(at + 1)
        return self.read(size) if len(self.head) >= size else self._rest_of_head() + self.stream.readline(size)

    def _rest_of_head(self) -> bytes:
        rest, self.head = self.head, b""
        return rest


Pieces = Iterator[tuple[bytes, bool]]  # bytes of a document, and whether they are only part of one


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
    """Documents that end with a line for which `ends` holds; `keep` leaves that line in the document."""

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
        *done, carry = (carry + data).split(b"\f")
        yield from ((one, False) for one in done)
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
    """The length of `data` without an unfinished character at its end."""
    for back in range(1, 4):
        if data[-back] >= 0xC0:
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _read_lines(path: Path, reading: Reading) -> Iterator[Record]:
    with _FileStream(path) as stream:
        number = 0
        while line := stream.bytes.readline(LONGEST_LINE_BYTES):
            number += 1
            yield _record_of_line(line, f"{path}:{number}", reading.field, stream.advance())


def _record_of_line(line: bytes, where: str, field: str, read_bytes: int) -> Record:
    data, bad = decode_text(line)
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
    text, lone = _without_surrogates(text)
    return Record(text=text, read_bytes=read_bytes, bad_utf8=bad + lone)


def _without_surrogates(text: str) -> tuple[str, int]:
    """JSON may hold half a character ("\\ud800"), which no UTF-8 can."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, max(1, whole.count("�") - text.count("�"))


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
        why = "reading Parquet needs pyarrow"
        raise UserError(Problem(where=str(path), what=why, fix="pip install 'phalanx[parquet]'")) from error
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        what = f"is not Parquet: {str(error).splitlines()[0][:120]}"
        raise mistake(str(path), what, fix="write it again, or give it the ending it deserves") from error
