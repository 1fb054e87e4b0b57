"""The steps of building a dataset: check, tokenize, join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cp_plugin.megatron.dataset import files, work
from cp_plugin.megatron.dataset.description import Description, flags_for
from cp_plugin.megatron.dataset.folder import PLAN, Plan, empty
from cp_plugin.megatron.dataset.pool import Pool, pool
from cp_plugin.megatron.dataset.progress import Bar
from cp_plugin.megatron.dataset.recipe import Recipe
from cp_plugin.megatron.dataset.shards import shards
from cp_plugin.megatron.models import indexed
from cp_plugin.megatron.models.tokenizers import Tokenizer

_NAMED = 20


def make(
    path: str,
    folder: Path,
    plan: Plan,
    recipe: Recipe,
    tokenizer: Tokenizer,
    workers: int,
    console: Console | None,
) -> Description:
    """Do what is missing of a dataset, in a folder that nobody else uses.

    Raises:
        ValueError, OSError, RuntimeError: as ``build.build``. What is done is kept.
    """
    job = work.Job(
        sources=plan.sources,
        shards=shards(plan.sources, plan.shard_bytes),
        tokenizer=tokenizer,
        end=tokenizer.end_of_document if recipe.append_eod else None,
        key=recipe.json_key,
        skip_bad=recipe.skip_bad,
        folder=folder,
    )
    with pool(job, min(workers, len(job.shards))) as processes:
        if not (folder / PLAN).exists():
            empty(folder)
            plan = _checked(processes, job, plan, console)
            plan.save(folder)
        written = {n: found for n in range(len(job.shards)) if (found := work.finished(job, n)) is not None}
        _say(console, len(written), len(job.shards))
        missing = [n for n in range(len(job.shards)) if n not in written]
        with Bar("tokenizing", job, missing, console) as bar:
            written.update(processes.run(work.tokenize, missing, bar.show))
    parts = [written[n] for n in range(len(job.shards))]
    if not sum(part.documents for part in parts):
        raise ValueError(f"{recipe.paths[0]}: the tokenizer finds no token in the text; is it the right one?")
    done = _description(path, plan, recipe, tokenizer, parts)
    unfinished = str(folder / "joined")
    try:
        with Bar("joining", job, range(len(parts)), console) as bar:
            names = [work.name(folder, n) for n in range(len(parts))]
            indexed.join(unfinished, bar.track(names), tokenizer.vocabulary)
        done.save(Path(f"{unfinished}.json"))
        files.publish(unfinished, path)
    finally:
        files.remove(unfinished)
    (folder / PLAN).unlink()
    return done


def _say(console: Console | None, done: int, shards: int) -> None:
    if done and console is not None:
        console.print(f"continued: {done} of {shards} shards are there", highlight=False)


def _checked(processes: Pool, job: work.Job, plan: Plan, console: Console | None) -> Plan:
    """Read everything once, so that what is wrong with it shows before the work.

    Raises:
        ValueError: for documents that cannot be read, by file and line or offset, unless they are to be left out; if
            there is no text at all.
    """
    numbers = range(len(job.shards))
    with Bar("checking", job, numbers, console) as bar:
        found = dict(processes.run(work.check, numbers, bar.show))
    checked = [found[n] for n in numbers]
    problems = _located(job, checked)
    bad = sum(one.bad for one in checked)
    if bad and not job.skip_bad:
        more = f"\n... and {bad - len(problems)} more" if bad > len(problems) else ""
        raise ValueError("\n".join(problems) + f"{more}\n{bad} to put right, or to leave out with --skip-bad")
    if not any(one.documents for one in checked):
        raise ValueError(
            f"{plan.recipe['PATHS'][0]}: no text in {len(job.sources)} files"
            + (f" ({bad} documents cannot be read, the first: {problems[0]})" if bad else "")
        )
    empty = [job.sources[n].path for one in checked for n in one.without_text]
    return replace(plan, without_text=empty[:_NAMED], unreadable=problems)


def _located(job: work.Job, checked: Sequence[work.Checked]) -> list[str]:
    """The first problems as file, line and text: lines are numbered from the beginning of the file."""
    before: dict[tuple[int, int], int] = {}
    so_far: dict[int, int] = {}
    for shard, one in zip(job.shards, checked, strict=True):
        for piece, lines in zip(shard, one.lines, strict=True):
            before[piece.source, piece.begin] = so_far.get(piece.source, 0)
            so_far[piece.source] = so_far.get(piece.source, 0) + lines
    found = []
    for problem in (problem for one in checked for problem in one.problems):
        line = f":{before[problem.source, problem.piece] + problem.line}" if problem.line else ""
        found.append(f"{job.sources[problem.source].path}{line}: {problem.text}")
    return found[:_NAMED]


def _description(
    path: str, plan: Plan, recipe: Recipe, tokenizer: Tokenizer, parts: Iterable[work.Written]
) -> Description:
    totals: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts) for name in ("documents", "tokens", "empty", "bad")
    }
    return Description(
        files=len(plan.sources),
        **totals,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document if recipe.append_eod else None,
        element_bytes=indexed.element_bytes(tokenizer.vocabulary),
        flags=flags_for(path, recipe.tokenizer, tokenizer.vocabulary),
        without_text=plan.without_text,
        unreadable=plan.unreadable,
        recipe=plan.recipe,
    )
