"""How far it is: files, tokens, tokens per second, time left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cp_plugin.megatron.dataset.work import Job


class Bar(AbstractContextManager["Bar"]):
    """A progress bar over shards, by the bytes of their files."""

    def __init__(self, title: str, job: Job, shards: Collection[int], console: Console | None) -> None:
        self._shards = list(shards)
        self._bytes = [sum(piece.end - piece.begin for piece in job.shards[n]) for n in self._shards]
        self._files = sum(piece.end == job.sources[piece.source].size for n in self._shards for piece in job.shards[n])
        self._progress = Progress(
            TextColumn(title),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:.0f} % {task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=console is None or not self._shards,
        )
        self._task = self._progress.add_task("", total=sum(self._bytes) or 1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *failed: object) -> None:
        if failed[0] is None:
            self._progress.update(self._task, completed=sum(self._bytes) or 1)
        self._progress.stop()

    def show(self, read: int, tokens: int, finished: int) -> None:
        """So many bytes read, tokens written and files finished."""
        text = f"{finished:,}/{self._files:,} files"
        if tokens:
            seconds = max(1e-3, self._progress.tasks[self._task].elapsed or 0.0)
            text += f", {tokens / 1e6:,.1f} M tokens, {tokens / seconds:,.0f}/s"
        self._progress.update(self._task, completed=read, description=text)

    def track[T](self, items: Iterable[T]) -> Iterator[T]:
        """These, one for every shard, counted when the next is asked for."""
        for item, size in zip(items, self._bytes, strict=True):
            yield item
            self._progress.advance(self._task, size)
