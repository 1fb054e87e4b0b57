"""Documents of files: the whole text of a file, or one line of a ``.jsonl`` each."""

from __future__ import annotations

import gzip
import io
import json
import os
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from cp_plugin.megatron.dataset.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file that is one document, or some lines of another."""

    source: Source
    size: int
    """Bytes of the file, as it is on disk."""
    lines: Sequence[bytes] | None = None
    """None: the file is one document."""
    first: int = 1
    """Number of the first of these lines."""
    problem: str | None = None
    """Why the file cannot be read behind these lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, or why it is none."""

    text: str
    where: str
    """Its file, and its line in it."""
    problem: str | None = None


class SourceChanged(ValueError):
    """A file is not what it was when the work began."""


def batches(sources: Sequence[Source], size: int) -> Iterator[list[Piece]]:
    """All files in their order, about ``size`` bytes at a time. Raises SourceChanged and OSError as ``documents``."""
    batch: list[Piece] = []
    held = 0
    for source in sources:
        for piece in _cut(source, size) if source.kind == "lines" else [Piece(source=source, size=source.size)]:
            batch.append(piece)
            held += piece.size
            if held >= size:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def documents(piece: Piece, key: str) -> Iterator[Document]:
    """Its documents in order, also empty ones; those that cannot be read have a problem.

    key: of a JSON object, where its text is.

    Raises:
        SourceChanged: if the file has another size or time of change than when it was found.
        OSError: if it cannot be opened.
    """
    path = piece.source.path
    if piece.lines is None:
        yield _document(path, lambda: _whole(piece.source))
        return
    for number, line in enumerate(piece.lines, piece.first):
        if line.strip():
            yield _document(f"{path}:{number}", lambda line=line: _value(line, key))
    if piece.problem is not None:
        yield Document(text="", where=f"{path}:{piece.first + len(piece.lines)}", problem=piece.problem)


def _document(where: str, text: Callable[[], str]) -> Document:
    try:
        return Document(text=text(), where=where)
    except SourceChanged:
        raise
    except ValueError as error:
        return Document(text="", where=where, problem=str(error))


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    with open(source.path, "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
            raise SourceChanged(f"{source.path}: changed while the dataset is built from it; start again")
        yield file


def _cut(source: Source, size: int) -> Iterator[Piece]:
    """A file of lines in pieces; what gzip finds damaged ends it."""
    with _opened(source) as file:
        stream = gzip.GzipFile(fileobj=file) if source.packed else file
        position, first, problem, lines = 0, 1, None, [b""]
        while lines and problem is None:
            lines, problem = _some_lines(stream, size)
            yield Piece(source=source, size=file.tell() - position, lines=lines, first=first, problem=problem)
            position, first = file.tell(), first + len(lines)


def _some_lines(stream: gzip.GzipFile | BinaryIO, size: int) -> tuple[list[bytes], str | None]:
    """At least ``size`` bytes of lines, or what is left, and why there are no more."""
    lines: list[bytes] = []
    held = 0
    try:
        with _unpacking():
            while held < size and (line := stream.readline()):
                lines.append(line)
                held += len(line)
    except ValueError as error:
        return lines, str(error)
    return lines, None


def _whole(source: Source) -> str:
    with _opened(source) as file, _unpacking():
        data = gzip.decompress(file.read()) if source.packed else file.read()
    return _decoded(data, python=source.python)


def _value(line: bytes, key: str) -> str:
    """The text in a line of JSON. ValueError with what is wrong."""
    text = _decoded(line, python=False)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON {type(found).__name__}, not an object with the key {key!r}")
    if key not in found:
        raise ValueError(f"no key {key!r} (it has {', '.join(map(repr, found)) or 'none'}); choose with --json-key")
    if not isinstance(found[key], str):
        raise ValueError(f"the key {key!r} holds a {type(found[key]).__name__}, not text")
    try:
        found[key].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the key {key!r} is half of a surrogate pair, not text") from None
    return found[key]


def _decoded(data: bytes, *, python: bool) -> str:
    """Text in UTF-8, or in the encoding a Python file declares. ValueError with the offset of the first bad byte."""
    encoding = "utf-8-sig"
    if python:
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError as error:
            if "unknown" in str(error) or "problem" in str(error):
                raise ValueError(f"declares an {error}") from None
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not text in {encoding.removesuffix('-sig')}: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None


@contextmanager
def _unpacking() -> Iterator[None]:
    """What gzip raises for damaged files, as ValueError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"damaged gzip file ({error})") from None
