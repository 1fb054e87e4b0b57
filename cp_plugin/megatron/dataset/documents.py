"""The documents of a piece of a file: the whole text of a file, or one line of a ``.jsonl`` each."""

from __future__ import annotations

import gzip
import io
import json
import os
import tokenize
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from cp_plugin.megatron.dataset.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a file: the lines that begin in these bytes. A file that is one document, or packed, is one piece."""

    source: int
    """Its number in the list of files."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, or why it is none."""

    text: str
    read: int
    """Bytes of the file since the last document."""
    line: int = 0
    """Within the piece, from 1; 0: the file is one document."""
    problem: str | None = None


class SourceChanged(ValueError):
    """A file is not what it was when the work was planned."""


def read(source: Source, piece: Piece, key: str) -> Iterator[Document]:
    """The documents of this piece in order, also empty ones; those that cannot be read have a problem.

    key: of a JSON object, where its text is.

    Raises:
        SourceChanged: if the file has another size or time of change than planned.
        OSError: if it cannot be opened.
    """
    with open(source.path, "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
            raise SourceChanged(f"{source.path}: changed while the dataset is built from it; start over with --fresh")
        if source.kind == "lines":
            yield from _packed_lines(file, key) if source.packed else _lines(file, piece, key)
        else:
            yield _whole(file, source)


def _whole(file: BinaryIO, source: Source) -> Document:
    try:
        with _unpacking():
            data = gzip.decompress(file.read()) if source.packed else file.read()
        return Document(text=_decoded(data, python=source.python), read=source.size)
    except ValueError as error:
        return Document(text="", read=source.size, problem=str(error))


def _lines(file: BinaryIO, piece: Piece, key: str) -> Iterator[Document]:
    if piece.begin:
        file.seek(piece.begin - 1)
        file.readline()  # the rest of a line that began earlier, or the end of it
    position, number = file.tell(), 0
    while position < piece.end and (line := file.readline()):
        position, number = position + len(line), number + 1
        if line.strip():
            yield _line(line, number, key, len(line))


def _packed_lines(file: BinaryIO, key: str) -> Iterator[Document]:
    number, before = 0, 0
    stream = gzip.GzipFile(fileobj=file)
    while True:
        number += 1
        try:
            with _unpacking():
                line = stream.readline()
        except ValueError as error:
            yield Document(text="", read=0, line=number, problem=str(error))
            return
        if not line:
            return
        now = file.tell()
        if line.strip():
            yield _line(line, number, key, now - before)
            before = now


def _line(line: bytes, number: int, key: str, read: int) -> Document:
    try:
        return Document(text=_value(line, key), read=read, line=number)
    except ValueError as error:
        return Document(text="", read=read, line=number, problem=str(error))


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
