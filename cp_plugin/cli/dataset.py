"""The ``cp-plugin dataset`` command."""

from __future__ import annotations

import errno
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console

if TYPE_CHECKING:
    from cp_plugin.megatron.dataset.recipe import Description, Recipe

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHOWN = 3


def dataset(
    prefix: Annotated[
        Path, typer.Argument(help="prefix of the files to write: PREFIX_text_document.bin, .idx and .json")
    ],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="files and folders; default: Python's standard library")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="KIND", help="bytes, huggingface:NAME_OR_PATH, sentencepiece:FILE or tiktoken:FILE")
    ] = "bytes",
    suffix: Annotated[
        str | None,
        typer.Option(metavar="SUFFIXES", help="file suffixes to take from folders, comma-separated, such as .txt,.md"),
    ] = None,
    json_key: Annotated[
        str, typer.Option(metavar="KEY", help="key of the text in each line of a .jsonl file")
    ] = "text",
    append_eod: Annotated[
        bool,
        typer.Option("--append-eod/--no-append-eod", help="end every document with an end-of-document token"),
    ] = True,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="vocabulary size of the model; a tokenizer with more ids is refused")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="stop before the file that would exceed this many bytes")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes; default: one per CPU core")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="skip unreadable documents, and report them")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="overwrite an existing dataset, whatever it was built from")
    ] = False,
    as_json: output.AsJson = None,
) -> None:
    """Build a Megatron dataset from text and .jsonl files, gzipped or not, and print the flags to train on it.

    The dataset appears only when it is complete. Megatron's tokenizer flags may follow after ``--``.
    """
    from cp_plugin.megatron.dataset.build import build
    from cp_plugin.megatron.dataset.recipe import Recipe
    from cp_plugin.megatron.dataset.sources import LINES, PACKED, SUFFIXES, standard_library
    from cp_plugin.megatron.models.tokenizers import named

    with flags.errors_in_one_line(), _system_errors_in_one_line():
        words = list(map(str, paths or []))
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        given, more = [Path(word) for word in words[:first]], words[first:]
        if not given and (prefix.exists() or prefix.suffix in (*SUFFIXES, *LINES, PACKED)):
            raise ValueError(
                f"{prefix}: the first argument is the prefix of the files to write, the sources follow it: write "
                f"cp-plugin dataset {prefix.name.partition('.')[0] or 'text'} {prefix}"
            )
        recipe = Recipe(
            paths=tuple(given) or (standard_library(),),
            tokenizer=named(tokenizer, more),
            suffixes=_suffixes(suffix) if suffix else SUFFIXES if given else (".py",),
            json_key=json_key,
            append_eod=append_eod,
            skip_bad=skip_bad or not given,  # the standard library has files that are unreadable on purpose
            max_bytes=max_bytes,
        )
        console = None if output.only_json(as_json) else new_console(stderr=True)
        done = build(prefix, recipe, workers=workers, fresh=fresh, vocab_size=vocab_size, console=console)
    output.show(as_json, lambda: asdict(done), lambda: _show(done, recipe))


def _suffixes(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(","))
    if wrong := [word for word in found if not word.startswith(".") or "/" in word or word.endswith(".gz")]:
        raise ValueError(
            f"--suffix {text}: {wrong[0]!r} is not a suffix; write suffixes with their dots, separated by commas, such "
            "as .txt,.md (.gz files are included anyway)"
        )
    return found


def _show(done: Description, recipe: Recipe) -> None:
    path = done.flags[1]
    typer.echo(
        f"{path}.bin, .idx, .json: {done.documents:,} documents, {done.tokens:,} tokens from {done.files:,} files"
    )
    for count, what, names in (
        (done.empty, "documents without text skipped", done.without_text),
        (done.bad, "unreadable documents skipped", done.unreadable),
    ):
        if count:
            named = "".join(f"\n    {name}" for name in names[:_SHOWN]) + "\n    ..." * (len(names) > _SHOWN)
            typer.echo(f"{count:,} {what}{':' * bool(names)}{named}")
    if not recipe.append_eod:
        typer.echo("no end-of-document tokens: nothing marks document boundaries")
    typer.echo("To train on it:")
    typer.echo(f"    {shlex.join(done.flags)}")


@contextmanager
def _system_errors_in_one_line() -> Iterator[None]:
    """Signals end with the shell's exit status for them, errors of the system with 1."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        typer.echo("interrupted; nothing was built", err=True)
        raise typer.Exit(end.code if isinstance(end, SystemExit) else 128 + signal.SIGINT) from None
    except OSError as error:
        what = f"{error.filename or 'the dataset'}: {error.strerror or error}"
        fix = "; free some space, and start again" if error.errno in _FULL else ""
        output.error(f"cannot read or write {what}{fix}")
        raise typer.Exit(1) from None
    except RuntimeError as error:
        output.error(str(error))
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)
