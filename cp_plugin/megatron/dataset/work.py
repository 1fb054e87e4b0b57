"""What a worker process does with one shard: check it, or write its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cp_plugin.megatron.dataset import files
from cp_plugin.megatron.dataset.documents import Document, Piece, read
from cp_plugin.megatron.dataset.files import Number
from cp_plugin.megatron.dataset.shards import Shard
from cp_plugin.megatron.dataset.sources import Source
from cp_plugin.megatron.models import indexed
from cp_plugin.megatron.models.tokenizers import Tokenizer

_NAMED = 20
"""Problems of one shard that are reported by name; all are counted."""

type Count = Callable[[int, int, int], None]
"""Of progress since the last call: bytes read, tokens written, files finished."""


class Stopped(Exception):
    """The work is to end here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all workers know."""

    sources: Sequence[Source]
    shards: Sequence[Shard]
    tokenizer: Tokenizer
    end: int | None
    """Token behind every document."""
    key: str
    skip_bad: bool
    folder: Path
    """Where shards are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A document that cannot be read."""

    source: int
    line: int
    """Within the piece, from 1; 0: the file is one document."""
    piece: int
    """Where in its file the piece begins."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a shard holds."""

    documents: int
    """With text in them."""
    empty: int
    without_text: list[int]
    """Files that are one empty document, at most so many as are reported by name."""
    bad: int
    problems: list[Problem]
    lines: list[int]
    """Of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a shard; the contents of its .json file."""

    documents: Number
    tokens: Number
    empty: Number
    """Documents without text, or with text that has no token."""
    bad: Number


def check(job: Job, number: int, count: Count) -> Checked:
    """Read every document of a shard, and keep nothing."""
    documents = empty = bad = 0
    without_text: list[int] = []
    problems: list[Problem] = []
    lines = []
    for piece in job.shards[number]:
        line = 0
        for document in _documents(job, piece, count):
            line = document.line
            if document.problem is not None:
                bad += 1
                text = document.problem
                problems.append(Problem(source=piece.source, line=line, piece=piece.begin, text=text))
                del problems[_NAMED:]
            elif document.text:
                documents += 1
            else:
                empty += 1
                if not line and len(without_text) < _NAMED:
                    without_text.append(piece.source)
        lines.append(line)
    return Checked(documents=documents, empty=empty, without_text=without_text, bad=bad, problems=problems, lines=lines)


def tokenize(job: Job, number: int, count: Count) -> Written:
    """Write the tokens of a shard to files of its own, which have their names once they are complete, the .json last.

    Raises:
        ValueError: for a document that cannot be read (unless these are left out), or has ids that do not fit.
        OSError: if it cannot be written.
    """
    final = name(job.folder, number)
    unfinished = f"{final}.unfinished"
    totals = {"documents": 0, "tokens": 0, "empty": 0, "bad": 0}
    try:
        indexed.write(unfinished, _tokens(job, number, count, totals), job.tokenizer.vocabulary)
        written = Written(**totals)
        Path(f"{unfinished}.json").write_text(json.dumps(asdict(written)), encoding="utf-8")
        files.publish(unfinished, final)
    finally:
        files.remove(unfinished)
    return written


def finished(job: Job, number: int) -> Written | None:
    """What is in the files of a shard; None where they are not there, or not whole."""
    path = name(job.folder, number)
    try:
        written = files.described(Written, Path(f"{path}.json"))
    except (OSError, ValueError):
        return None
    size = indexed.element_bytes(job.tokenizer.vocabulary)
    whole = files.is_complete(path, written.documents, written.tokens, size)
    return written if whole else None


def name(folder: Path, number: int) -> str:
    """The files of a shard, without suffix."""
    return str(folder / f"shard-{number:06d}")


def _tokens(job: Job, number: int, count: Count, totals: dict[str, int]) -> Iterator[np.ndarray]:
    for piece in job.shards[number]:
        for document in _documents(job, piece, count):
            if document.problem is not None and not job.skip_bad:
                raise ValueError(f"{job.sources[piece.source].path}: {document.problem}")
            ids = np.array(job.tokenizer.encode(document.text) if document.text else [], dtype=np.int64)
            if not len(ids):
                totals["bad" if document.problem is not None else "empty"] += 1
                continue
            if job.end is not None:
                ids = np.append(ids, job.end)
            _check_fit(ids, job, piece, document)
            totals["documents"] += 1
            totals["tokens"] += len(ids)
            count(0, len(ids), 0)
            yield ids


def _check_fit(ids: np.ndarray, job: Job, piece: Piece, document: Document) -> None:
    where = job.sources[piece.source].path + (", in a line" if document.line else "")
    if len(ids) > indexed.LONGEST:
        raise ValueError(
            f"{where}: a document of {len(ids):,} tokens; Megatron's format has room for {indexed.LONGEST:,}: divide it"
        )
    if not 0 <= ids.min() <= ids.max() < job.tokenizer.vocabulary:
        wrong = ids.max() if ids.min() >= 0 else ids.min()
        raise ValueError(
            f"{where}: the tokenizer gives the id {wrong}, but says that it has {job.tokenizer.vocabulary} ids: its "
            "files do not belong together"
        )


def _documents(job: Job, piece: Piece, count: Count) -> Iterator[Document]:
    source = job.sources[piece.source]
    for document in read(source, piece, job.key):
        yield document
        count(document.read, 0, 0)
    count(0, 0, piece.end == source.size)
