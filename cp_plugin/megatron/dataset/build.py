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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cp_plugin.megatron.dataset.documents import Document, read
from cp_plugin.megatron.dataset.recipe import Description, Recipe, require_same
from cp_plugin.megatron.dataset.sources import Source, find
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
_COLUMNS = (
    TextColumn("tokenizing"),
    BarColumn(bar_width=10),
    TextColumn("{task.percentage:.0f} % {task.description}"),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


def build(
    prefix: Path,
    recipe: Recipe,
    *,
    workers: int | None = None,
    fresh: bool = False,
    vocab_size: int | None = None,
    console: Console | None = None,
    batch_bytes: int = BATCH_BYTES,
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
    path = Path(f"{prefix}{ENDING}")
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
    job = _Job(recipe, tokenizer, np.dtype(indexed.element_type(tokenizer.vocabulary)))
    done = Description(
        files=len(sources),
        documents=0,
        tokens=0,
        empty=0,
        bad=0,
        without_text=[],
        unreadable=[],
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document if recipe.append_eod else None,
        element_bytes=job.element.itemsize,
        flags=_flags(path, recipe, tokenizer.vocabulary),
        recipe=written,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        unfinished = Path(folder, "dataset")
        with Progress(*_COLUMNS, console=console, disable=console is None) as progress:
            progress.add_task("", total=sum(source.size for source in sources) or 1)
            work = _in_order(job, _batches(sources, batch_bytes), workers or len(os.sched_getaffinity(0)))
            indexed.write(str(unfinished), _counted(work, done, recipe, progress), tokenizer.vocabulary)
        if not done.documents:
            bad = f" ({done.bad} documents cannot be read, the first: {done.unreadable[0]})" if done.bad else ""
            raise ValueError(
                f"{recipe.paths[0]}: no text in {len(sources)} files for which --tokenizer {recipe.tokenizer} has a "
                f"token{bad}"
            )
        done.save(unfinished)
        return _published(unfinished, path, done, None if fresh else recipe)


@dataclass(frozen=True, slots=True)
class _Job:
    """What all workers know."""

    recipe: Recipe
    tokenizer: Tokenizer
    element: np.dtype
    """Of a token."""


class _Tokenized(NamedTuple):
    """What became of a document: ids, or a problem, or neither."""

    where: str
    whole: bool
    """Whether it is all of its file."""
    size: int
    ids: np.ndarray | None = None
    problem: str | None = None


def _batches(sources: Iterable[Source], size: int) -> Iterator[list[Document]]:
    """All documents in their order, about ``size`` bytes at a time."""
    batch: list[Document] = []
    held = 0
    for source in sources:
        for document in read(source):
            batch.append(document)
            held += len(document.data)
            if held >= size:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _counted(
    work: Iterable[list[_Tokenized]], done: Description, recipe: Recipe, progress: Progress
) -> Iterator[np.ndarray]:
    """The ids of every document, counted. ValueError for documents that cannot be read, unless they are skipped."""
    (task,) = progress.tasks
    for batch in work:
        bad = [f"{one.where}: {one.problem}" for one in batch if one.problem is not None]
        if bad and not recipe.skip_bad:
            more = [f"... and {len(bad) - _NAMED} more"] if len(bad) > _NAMED else []
            put_right = f"{len(bad)} to fix, or to leave out with --skip-bad"
            raise ValueError("\n".join([*bad[:_NAMED], *more, put_right]))
        texts = [one.ids for one in batch if one.ids is not None]
        yield from texts
        done.documents += len(texts)
        done.tokens += sum(map(len, texts))
        done.bad += len(bad)
        done.empty += len(batch) - len(texts) - len(bad)
        without = [one.where for one in batch if one.whole and one.ids is None and one.problem is None]
        done.without_text.extend(without[: _NAMED - len(done.without_text)])
        done.unreadable.extend(bad[: _NAMED - len(done.unreadable)])
        text = f"{done.tokens / 1e6:,.1f} M tokens, {done.tokens / max(1e-3, task.elapsed or 0.0):,.0f}/s"
        progress.update(task.id, advance=sum(one.size for one in batch), description=text)


def _in_order(job: _Job, work: Iterable[list[Document]], workers: int) -> Iterator[list[_Tokenized]]:
    """Tokenize batches in worker processes, a few of them ahead; results come in the order of the batches."""
    context = multiprocessing.get_context("fork")  # so that all share one tokenizer
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), job))
    ahead: deque[Future[list[_Tokenized]]] = deque()
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


def _tokenized(batch: list[Document]) -> list[_Tokenized]:
    assert _job is not None
    return [_of(document, _job) for document in batch]


def _of(document: Document, job: _Job) -> _Tokenized:
    found = _Tokenized(document.where, not document.line, document.size)
    try:
        text = document.text(job.recipe.json_key)
    except ValueError as error:
        return found._replace(problem=str(error))
    if not (ids := job.tokenizer.encode(text) if text else []):
        return found._replace(whole=found.whole and not text)
    end = [job.tokenizer.end_of_document] if job.recipe.append_eod else []
    every = np.array([*ids, *end], dtype=np.int64)
    _check_fit(every, document.where, job.tokenizer.vocabulary)
    return found._replace(ids=every.astype(job.element))


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


def _published(unfinished: Path, path: Path, done: Description, compared: Recipe | None) -> Description:
    """Give the files their names, the .json last: whoever finds it finds all, also after a power failure.

    Where another process has just built the dataset, its files stay, or Changed is raised; unless ``compared`` is None.
    """
    with _locked(path.parent):
        if compared is not None and (theirs := _same(path, compared, done.recipe)) is not None:
            return theirs
        Path(f"{path}.json").unlink(missing_ok=True)  # never an old description with new data
        for suffix in ("bin", "idx", "json"):
            with open(f"{unfinished}.{suffix}", "rb") as file:
                os.fsync(file.fileno())
            os.replace(f"{unfinished}.{suffix}", f"{path}.{suffix}")
    return done


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _same(path: Path, recipe: Recipe, written: dict[str, Any]) -> Description | None:
    """The dataset that is there, with flags for this place and Megatron. Changed: made from something else."""
    done = Description.of(path)
    if done is None:
        return None
    require_same(path, done.recipe, written)
    if done.flags != (flags := _flags(path, recipe, done.vocabulary)):
        done = replace(done, flags=flags)
        done.save(path)
    return done


def _flags(path: Path, recipe: Recipe, vocabulary: int) -> list[str]:
    return ["--data-path", str(path), *training_flags(recipe.tokenizer, vocabulary)]


def _check_size(recipe: Recipe, vocabulary: int, limit: int | None) -> None:
    if limit is not None and vocabulary > limit:
        raise ValueError(
            f"--vocab-size {limit}: --tokenizer {recipe.tokenizer} has {vocabulary} ids, which a model of {limit} "
            f"cannot take in; give the model --vocab-size {vocabulary}, or choose another tokenizer"
        )
