"""Build a dataset, or find that it is there."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cp_plugin.megatron.dataset.documents import Piece, batches, documents
from cp_plugin.megatron.dataset.recipe import Description, Recipe, require_same
from cp_plugin.megatron.dataset.sources import find
from cp_plugin.megatron.models.tokenizers import training_flags
from cp_plugin.testing.launch_rank import die_with_parent

if TYPE_CHECKING:
    from cp_plugin.megatron.models.tokenizers import Tokenizer

ENDING = "_text_document"
"""Of the files' names, behind the prefix, as Megatron's own program writes it."""
BATCH_BYTES = 2**20
"""Of text that a worker process tokenizes at a time."""
_NAMED = 20
"""Files and documents that are reported by name; all are counted."""


def build(
    prefix: Path,
    recipe: Recipe,
    *,
    workers: int | None = None,
    fresh: bool = False,
    vocab_size: int | None = None,
    console: Console | None = None,
    batch_bytes: int | None = None,
) -> Description:
    """Build PREFIX_text_document.{bin,idx,json}, unless they are there already: all of them, or none.

    Args:
        workers: processes; default: one per CPU core.
        fresh: replace what is there, whatever it was made from.
        vocab_size: ids that the model to be trained has, at most so many as the tokenizer may have.
        console: where progress is shown; None: nowhere.
        batch_bytes: of text that a worker takes at a time; the result does not depend on it.

    Raises:
        ValueError: for files without text or not text, a tokenizer that cannot be opened or does not fit.
        Changed: if what is there was made from something else.
        OSError: where files cannot be read or written.
        RuntimeError: if a worker was killed.
    """
    path = f"{prefix}{ENDING}"
    sources = find(recipe.paths, recipe.suffixes, recipe.max_bytes)
    written = recipe.written(sources)
    if not fresh and (done := _same(path, recipe, written)) is not None:
        _check_size(recipe, done.vocabulary, vocab_size)
        return done

    from cp_plugin.megatron.models import indexed, tokenizers  # Megatron, which takes seconds to import

    tokenizer = tokenizers.load(recipe.tokenizer)
    _check_size(recipe, tokenizer.vocabulary, vocab_size)
    if recipe.append_eod and tokenizer.end_of_document is None:
        raise ValueError(f"--tokenizer {recipe.tokenizer}: it has no end-of-document token; add --no-append-eod")
    total = _Batch()
    job = _Job(recipe, tokenizer, np.dtype(indexed.element_type(tokenizer.vocabulary)))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{Path(path).name}.", dir=Path(path).parent) as folder:
        unfinished = f"{folder}/dataset"
        with _progress(console, sum(source.size for source in sources)) as progress:
            work = _in_order(job, batches(sources, batch_bytes or BATCH_BYTES), workers or _cores())
            indexed.write(unfinished, _counted(work, total, recipe, progress), tokenizer.vocabulary)
        if not total.documents:
            bad = f" ({total.bad} documents cannot be read, the first: {total.unreadable[0]})" if total.bad else ""
            raise ValueError(
                f"{recipe.paths[0]}: no text in {len(sources)} files for which --tokenizer {recipe.tokenizer} has a "
                f"token{bad}"
            )
        done = Description(
            files=len(sources),
            documents=total.documents,
            tokens=total.tokens,
            empty=total.empty,
            bad=total.bad,
            vocabulary=tokenizer.vocabulary,
            end_of_document=tokenizer.end_of_document if recipe.append_eod else None,
            element_bytes=job.element.itemsize,
            flags=_flags(path, recipe, tokenizer.vocabulary),
            without_text=total.without_text,
            unreadable=total.unreadable,
            recipe=written,
        )
        done.save(Path(f"{unfinished}.json"))
        return _published(unfinished, path, done, None if fresh else recipe)


@dataclass(frozen=True, slots=True)
class _Job:
    """What all workers know."""

    recipe: Recipe
    tokenizer: Tokenizer
    element: np.dtype
    """Of a token."""


@dataclass(slots=True)
class _Batch:
    """What became of some documents."""

    ids: list[np.ndarray] = field(default_factory=list)
    """Of each document that has a token."""
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    without_text: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    size: int = 0
    """Bytes of their files."""


def _counted(work: Iterable[_Batch], total: _Batch, recipe: Recipe, progress: Progress) -> Iterator[np.ndarray]:
    """The ids of every document, counted. ValueError for documents that cannot be read, unless they are skipped."""
    for batch in work:
        if batch.bad and not recipe.skip_bad:
            more = f"\n... and {batch.bad - _NAMED} more" if batch.bad > _NAMED else ""
            raise ValueError(
                "\n".join(batch.unreadable) + f"{more}\n{batch.bad} to put right, or to leave out with --skip-bad"
            )
        yield from batch.ids
        for name in ("documents", "tokens", "empty", "bad"):
            setattr(total, name, getattr(total, name) + getattr(batch, name))
        total.without_text = (total.without_text + batch.without_text)[:_NAMED]
        total.unreadable = (total.unreadable + batch.unreadable)[:_NAMED]
        (task,) = progress.tasks
        text = f"{total.tokens / 1e6:,.1f} M tokens, {total.tokens / max(1e-3, task.elapsed or 0.0):,.0f}/s"
        progress.update(task.id, advance=batch.size, description=text)


def _in_order(job: _Job, work: Iterable[list[Piece]], workers: int) -> Iterator[_Batch]:
    """Tokenize batches in worker processes, a few of them ahead; results come in the order of the batches."""
    context = multiprocessing.get_context("fork")  # so that all share one tokenizer
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), job))
    ahead: deque[Future[_Batch]] = deque()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking: torch has threads, all of them idle
            for batch in work:
                ahead.append(pool.submit(_tokenized, batch))
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process was killed, most likely because memory ran out: take fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_job: _Job | None = None


def _begin(parent: int, job: _Job) -> None:
    """Be a worker. A terminal's Ctrl-C reaches all processes, and the parent is to answer it."""
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends its workers by it, too
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job


def _tokenized(pieces: list[Piece]) -> _Batch:
    assert _job is not None
    batch = _Batch(size=sum(piece.size for piece in pieces))
    for piece in pieces:
        for document in documents(piece, _job.recipe.json_key):
            ids = _job.tokenizer.encode(document.text) if document.text else []
            if document.problem is not None:
                batch.bad += 1
                batch.unreadable.append(f"{document.where}: {document.problem}")
            elif not ids:
                batch.empty += 1
                if piece.lines is None and not document.text:
                    batch.without_text.append(document.where)
            else:
                end = [_job.tokenizer.end_of_document] if _job.recipe.append_eod else []
                found = np.array([*ids, *end], dtype=np.int64)
                _check_fit(found, document.where, _job.tokenizer.vocabulary)
                batch.ids.append(found.astype(_job.element))
    batch.documents, batch.tokens = len(batch.ids), sum(map(len, batch.ids))
    del batch.without_text[_NAMED:], batch.unreadable[_NAMED:]
    return batch


def _check_fit(ids: np.ndarray, where: str, vocabulary: int) -> None:
    from cp_plugin.megatron.models.indexed import LONGEST

    if len(ids) > LONGEST:
        raise ValueError(
            f"{where}: a document of {len(ids):,} tokens; Megatron's format has room for {LONGEST:,}: divide it"
        )
    low, high = ids.min(), ids.max()
    if not 0 <= low <= high < vocabulary:
        raise ValueError(
            f"{where}: the tokenizer gives the id {high if low >= 0 else low}, but says that it has {vocabulary} ids: "
            "its files do not belong together"
        )


def _published(unfinished: str, path: str, done: Description, compared: Recipe | None) -> Description:
    """Give the files their names, the .json last: whoever finds it finds all, also after a power failure.

    Where another process has just built the dataset, its files stay, or Changed is raised; unless ``compared`` is None.
    """
    with _alone(Path(path).parent):
        if compared is not None and (theirs := _same(path, compared, done.recipe)) is not None:
            return theirs
        Path(f"{path}.json").unlink(missing_ok=True)  # never an old description with new data
        for suffix in ("bin", "idx", "json"):
            with open(f"{unfinished}.{suffix}", "rb") as file:
                os.fsync(file.fileno())
            os.replace(f"{unfinished}.{suffix}", f"{path}.{suffix}")
    return done


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _same(path: str, recipe: Recipe, written: dict[str, Any]) -> Description | None:
    """The dataset that is there, with flags for this place and Megatron. Changed: made from something else."""
    done = Description.of(path)
    if done is None:
        return None
    require_same(path, done.recipe, written)
    flags = _flags(path, recipe, done.vocabulary)
    if done.flags != flags:
        done = replace(done, flags=flags)
        done.save(Path(f"{path}.json"))
    return done


def _flags(path: str, recipe: Recipe, vocabulary: int) -> list[str]:
    return ["--data-path", path, *training_flags(recipe.tokenizer, vocabulary)]


def _check_size(recipe: Recipe, vocabulary: int, limit: int | None) -> None:
    if limit is not None and vocabulary > limit:
        raise ValueError(
            f"--vocab-size {limit}: --tokenizer {recipe.tokenizer} has {vocabulary} ids, which a model of {limit} "
            f"cannot take in; give the model --vocab-size {vocabulary}, or choose another tokenizer"
        )


def _progress(console: Console | None, total: int) -> Progress:
    columns = (
        TextColumn("tokenizing"),
        BarColumn(bar_width=10),
        TextColumn("{task.percentage:.0f} % {task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=console is None)
    progress.add_task("", total=total or 1)
    return progress


def _cores() -> int:
    return len(os.sched_getaffinity(0))
