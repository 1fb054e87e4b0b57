"""Documents: the whole text of a file, or each line of a ``.jsonl``."""

from __future__ import annotations

import gzip
import io
import json
import os
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from cp_plugin.megatron.dataset.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """An undecoded document, decompressed."""

    source: Source
    data: bytes
    line: int = 0  # line number; 0: the whole file
    size: int  # bytes read from disk, for progress
    error: str | None = None  # gzip's error from here on

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.source.path}:{self.line}" if self.line else self.source.path

    def text(self, key: str) -> str:
        """Its text; for a line, that under the key of its JSON object. ValueError if it cannot be read."""
        if self.error is not None:
            raise ValueError(f"damaged gzip file ({self.error})")
        return _value(self.data, key) if self.line else _decoded(self.data, python=self.source.python)


class SourceChanged(ValueError):
    """A file has changed since the build started."""


def read(source: Source) -> Iterator[Document]:
    """A file's documents in order without blank lines; in a damaged gzip file the last one carries the error.

    Raises:
        SourceChanged: if size or modification time differ from when the file was found.
        OSError: if it cannot be opened.
    """
    line = position = 0
    with open(source.path, "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
            raise SourceChanged(f"{source.path}: changed while the dataset was being built from it; start again")
        stream = gzip.GzipFile(fileobj=file) if source.packed else file
        try:
            if not source.lines:
                yield Document(source=source, data=stream.read(), size=source.size)
                return
            for line, data in enumerate(stream, 1):
                if data.strip():
                    yield Document(source=source, data=data, line=line, size=file.tell() - position)
                    position = file.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            where = line + 1 if source.lines else 0
            yield Document(source=source, data=b"", line=where, size=source.size - position, error=str(error))


def _value(line: bytes, key: str) -> str:
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
    """Decode UTF-8, or the encoding that a Python file declares."""
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
