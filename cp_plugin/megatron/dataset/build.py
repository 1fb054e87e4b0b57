"""Build a dataset, or reuse a finished one."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tempfile
import threading
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
from rich.progress import Progress

from cp_plugin.megatron.dataset.documents import Document, read
from cp_plugin.megatron.dataset.recipe import Description, Recipe, require_same
from cp_plugin.megatron.dataset.sources import Source, find
from cp_plugin.megatron.models.tokenizers import training_flags
from cp_plugin.testing.launch_rank import die_with_parent

if TYPE_CHECKING:
    from cp_plugin.megatron.models.tokenizers import Tokenizer

ENDING = "_text_document"  # appended to the prefix, as by Megatron's own preprocessing
BATCH_BYTES = 2**20  # text that a worker tokenizes at a time
_NAMED = 20  # files and documents that are reported by name; all are counted


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
    """Build PREFIX_text_document.{bin,idx,json} unless they exist; all of them appear, or none.

    Args:
        workers: processes; default: one per CPU core.
        fresh: replace an existing dataset, whatever its recipe.
        vocab_size: the model's number of token ids, an upper limit for the tokenizer's.
        console: shows progress.
        batch_bytes: text that a worker takes at a time; does not affect the result.

    Raises:
        ValueError: for unreadable or empty sources, and a tokenizer that cannot be opened or does not fit.
        Changed: if the existing dataset has another recipe.
        OSError: for files that cannot be read or written.
        RuntimeError: if a worker was killed.
    """
    path = Path(f"{prefix}{ENDING}")
    sources = find(recipe.paths, recipe.suffixes, recipe.max_bytes)
    written = recipe.written(sources)
    if not fresh and (done := _same(path, recipe, written)) is not None:
        _check_size(recipe, done.vocabulary, vocab_size)
        return done

    with warnings.catch_warnings(action="ignore"):  # of Megatron's, about libraries that nothing here needs
        from cp_plugin.megatron.models import indexed, tokenizers  # imports Megatron, which takes seconds

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
        with Progress(console=console, disable=console is None) as progress:
            progress.add_task("", total=sum(source.size for source in sources) or 1)
            work = _in_order(job, _batches(sources, batch_bytes), workers or len(os.sched_getaffinity(0)))
            indexed.write(str(unfinished), _counted(work, done, recipe, progress), tokenizer.vocabulary)
        if not done.documents:
            bad = f" ({done.bad} documents are unreadable, the first: {done.unreadable[0]})" if done.bad else ""
            raise ValueError(
                f"{recipe.paths[0]}: --tokenizer {recipe.tokenizer} finds no tokens in {len(sources)} files{bad}"
            )
        done.save(unfinished)
        return _published(unfinished, path, done, None if fresh else recipe)


@dataclass(frozen=True, slots=True)
class _Job:
    """State shared by all workers."""

    recipe: Recipe
    tokenizer: Tokenizer
    element: np.dtype


class _Tokenized(NamedTuple):
    """A document's ids, its problem, or neither if it is empty."""

    where: str
    whole: bool  # whether it is a whole file
    size: int
    ids: np.ndarray | None = None
    problem: str | None = None


def _batches(sources: Iterable[Source], size: int) -> Iterator[list[Document]]:
    """All documents in order, in batches of about ``size`` bytes."""
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
    """Yield every document's ids and count them in ``done``; ValueError for unreadable documents unless skipped."""
    (task,) = progress.tasks
    for batch in work:
        bad = [f"{one.where}: {one.problem}" for one in batch if one.problem is not None]
        if bad and not recipe.skip_bad:
            more = [f"... and {len(bad) - _NAMED} more"] if len(bad) > _NAMED else []
            put_right = f"{len(bad)} unreadable: fix, or skip with --skip-bad"
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
    """Tokenize batches in worker processes, a bounded number ahead; results come in order."""
    context = multiprocessing.get_context("fork")  # shares the tokenizer
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), job))
    ahead: deque[Future[list[_Tokenized]]] = deque()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking: torch's threads are idle
            for batch in work:
                with _signals_held():
                    ahead.append(pool.submit(_tokenized, batch))
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process was killed, most likely because memory ran out: use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end the build wait while processes are forked: Python swallows what a handler raises in between."""
    if threading.current_thread() is not threading.main_thread():  # Python runs handlers in the main thread alone
        yield
        return
    held: list[int] = []
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


_job: _Job | None = None


def _begin(parent: int, job: _Job) -> None:
    """Initialize a worker: the parent alone handles a terminal's Ctrl-C, which reaches all processes."""
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # used by the pool, too
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job


def _tokenized(batch: list[Document]) -> list[_Tokenized]:
    assert _job is not None
    return [_tokenize(document, _job) for document in batch]


def _tokenize(document: Document, job: _Job) -> _Tokenized:
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
        raise ValueError(f"{where}: a document of {len(ids):,} tokens; Megatron's format allows {LONGEST:,}: split it")
    low, high = ids.min(), ids.max()
    if not 0 <= low <= high < vocabulary:
        raise ValueError(
            f"{where}: the tokenizer returns the id {high if low >= 0 else low}, but claims to have {vocabulary} ids: "
            "its files do not belong together"
        )


def _published(unfinished: Path, path: Path, done: Description, compared: Recipe | None) -> Description:
    """Rename the files, the .json last: if it exists all do, even after a power failure.

    If another process has just built the dataset, keep its files or raise Changed; unless ``compared`` is None.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # where the file system has no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        if compared is not None and (theirs := _same(path, compared, done.recipe)) is not None:
            return theirs
        Path(f"{path}.json").unlink(missing_ok=True)  # no old description beside new data
        for suffix in ("bin", "idx", "json"):
            with open(f"{unfinished}.{suffix}", "rb") as file:
                os.fsync(file.fileno())
            os.replace(f"{unfinished}.{suffix}", f"{path}.{suffix}")
        return done
    finally:
        os.close(folder)


def _same(path: Path, recipe: Recipe, written: dict[str, Any]) -> Description | None:
    """The existing dataset, with flags for its current path and this Megatron; Changed if its recipe differs."""
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
            f"--vocab-size {limit}: --tokenizer {recipe.tokenizer} has {vocabulary} token ids: use --vocab-size "
            f"{vocabulary} for the model, or another tokenizer"
        )
