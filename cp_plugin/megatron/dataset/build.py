"""Build a dataset, or continue to, or find that it is there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cp_plugin.megatron.dataset import files
from cp_plugin.megatron.dataset.description import ENDING, Description, flags_for
from cp_plugin.megatron.dataset.folder import PLAN, Plan, empty, locked
from cp_plugin.megatron.dataset.recipe import Changed, Recipe, first_difference, require_same
from cp_plugin.megatron.dataset.sources import find
from cp_plugin.megatron.models.tokenizers import Name


def build(
    prefix: Path,
    recipe: Recipe,
    *,
    workers: int | None = None,
    fresh: bool = False,
    vocab_size: int | None = None,
    console: Console | None = None,
    shard_bytes: int | None = None,
) -> Description:
    """Build PREFIX_text_document.{bin,idx,json}, unless they are there already; continue where a run was interrupted.

    Args:
        workers: processes; default: one per CPU core.
        fresh: start over, whatever is there.
        vocab_size: ids that the model to be trained has, at most so many as the tokenizer may have.
        console: where progress is shown; None: nowhere.
        shard_bytes: of text, after which there is something to continue with.

    Raises:
        ValueError: for files without text or not text, a tokenizer that cannot be opened or does not fit.
        Changed: if what is there, finished or not, was made from something else.
        OSError: where files cannot be read or written.
        RuntimeError: if a worker was killed.
    """
    path = f"{prefix}{ENDING}"
    folder = Path(f"{path}.unfinished")
    sources = find(recipe.paths, recipe.suffixes, recipe.max_bytes)
    written = recipe.written(sources)
    begun = None if fresh else Plan.load(folder)
    if not fresh and (done := _done(path)) is not None:
        if begun is None:
            require_same(path, done.recipe, written)
        if done.recipe == written:
            _check_size(recipe.tokenizer, done.vocabulary, vocab_size)
            ours = begun is None or begun.recipe == written
            return _current(done, path, recipe, folder if folder.exists() and ours else None)
    if begun is not None:
        require_same(str(folder), begun.recipe, written, first_difference(begun.sources, sources))

    from cp_plugin.megatron.dataset.make import make  # Megatron, which takes seconds to import
    from cp_plugin.megatron.models import tokenizers

    tokenizer = tokenizers.load(recipe.tokenizer)
    _check_size(recipe.tokenizer, tokenizer.vocabulary, vocab_size)
    if recipe.append_eod and tokenizer.end_of_document is None:
        raise ValueError(f"--tokenizer {recipe.tokenizer}: it has no end-of-document token; add --no-append-eod")
    if begun is not None and begun.sample != tokenizer.sample:
        raise Changed(
            f"{folder}: begun with another version of --tokenizer {recipe.tokenizer}; start over with --fresh"
        )
    plan = begun or Plan(recipe=written, sample=tokenizer.sample, shard_bytes=shard_bytes, sources=sources)
    with locked(folder, keep=lambda: (folder / PLAN).exists()):
        if fresh:
            empty(folder)
        elif Plan.load(folder) != begun:
            raise ValueError(f"{folder}: another process has just been building this dataset; look again")
        return make(path, folder, plan, recipe, tokenizer, workers or len(os.sched_getaffinity(0)), console)


def _done(path: str) -> Description | None:
    """The finished dataset of this name."""
    found = Description.load(Path(f"{path}.json"))
    if found is None or not files.is_complete(path, found.documents, found.tokens, found.element_bytes):
        return None
    return found


def _current(done: Description, path: str, recipe: Recipe, leftover: Path | None) -> Description:
    """The description with flags for this place and the Megatron that is installed now; clears up."""
    flags = flags_for(path, recipe.tokenizer, done.vocabulary)
    if done.flags != flags:
        done = replace(done, flags=flags)
        done.save(Path(f"{path}.json"))
    if leftover is not None:
        with locked(leftover, keep=lambda: False):
            pass
    return done


def _check_size(tokenizer: Name, vocabulary: int, limit: int | None) -> None:
    if limit is not None and vocabulary > limit:
        raise ValueError(
            f"--vocab-size {limit}: --tokenizer {tokenizer} has {vocabulary} ids, which a model of {limit} cannot take "
            f"in; give the model --vocab-size {vocabulary}, or choose another tokenizer"
        )
