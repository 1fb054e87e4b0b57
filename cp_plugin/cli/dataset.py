"""The ``cp-plugin dataset`` command."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console

_SHOWN = 3


def dataset(
    prefix: Annotated[
        Path, typer.Argument(help="prefix of the files to write: PREFIX_text_document.bin, .idx and .json")
    ],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="files and folders; default: Python's standard library")
    ] = None,
    tokenizer: Annotated[str, typer.Option(metavar="KIND", help="bytes, or huggingface:NAME_OR_PATH")] = "bytes",
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
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="stop before the file that would exceed this many bytes")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="skip unreadable documents, and report them")] = False,
    as_json: output.AsJson = None,
) -> None:
    """Build a Megatron dataset from text and .jsonl files, gzipped or not, and print the flags to train on it.

    It replaces an older one under the same prefix when it is complete.
    """
    from cp_plugin.megatron.dataset import LINES, PACKED, STANDARD_LIBRARY, SUFFIXES, build

    with flags.errors_in_one_line():
        if not paths and (prefix.exists() or prefix.suffix in (*SUFFIXES, *LINES, PACKED)):
            raise ValueError(
                f"{prefix}: the first argument is the prefix of the files to write, the sources follow it: write "
                f"cp-plugin dataset {prefix.name.partition('.')[0] or 'text'} {prefix}"
            )
        chosen = tuple(suffix.split(",")) if suffix else SUFFIXES if paths else (".py",)
        if not all(word.startswith(".") for word in chosen):
            raise ValueError(
                f"--suffix {suffix}: write suffixes with their dots, separated by commas, such as .txt,.md"
            )
        try:
            done = build(
                prefix,
                paths or [STANDARD_LIBRARY],
                tokenizer=tokenizer,
                suffixes=chosen,
                json_key=json_key,
                append_eod=append_eod,
                skip_bad=skip_bad or not paths,  # the standard library has files that are unreadable on purpose
                max_bytes=max_bytes,
                console=None if output.only_json(as_json) else new_console(stderr=True),
            )
        except OSError as error:
            raise ValueError(f"{error.filename or prefix}: cannot be read or written: {error.strerror}") from None

    def show() -> None:
        counts = f"{done.documents:,} documents, {done.tokens:,} tokens from {done.files:,} files"
        typer.echo(f"{done.flags[1]}.bin, .idx, .json: {counts}; {done.empty:,} without text skipped")
        for name in done.unreadable[:_SHOWN]:
            typer.echo(f"skipped {name}")
        if more := done.unreadable[_SHOWN:]:
            typer.echo(f"skipped {len(more):,} more that are unreadable")
        typer.echo(f"To train on it:\n    {shlex.join(done.flags)}")

    output.show(as_json, lambda: asdict(done), show)
