"""The ``cp-plugin dataset`` command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from cp_plugin.tools import flags
from cp_plugin.tools.output import new_console


def dataset(
    prefix: Annotated[
        Path, typer.Argument(help="prefix of the files to write: PREFIX_text_document.bin, .idx and .json")
    ],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="files and folders; default: Python's standard library")
    ] = None,
    tokenizer: Annotated[str, typer.Option(metavar="KIND", help="bytes, or huggingface:NAME_OR_PATH")] = "bytes",
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="stop before the file that would exceed this many bytes")
    ] = None,
) -> None:
    """Build a Megatron dataset from text and .jsonl files, and print the flags to train on it.

    It replaces an older one under the same prefix when it is complete.
    """
    from cp_plugin.megatron.dataset import SUFFIXES, build

    with flags.errors_in_one_line():
        if not paths and (prefix.exists() or prefix.suffix in SUFFIXES):
            raise ValueError(
                f"{prefix}: the first argument is the prefix of the files to write, the sources follow it: write "
                f"cp-plugin dataset {prefix.name.partition('.')[0] or 'text'} {prefix}"
            )
        try:
            done = build(
                prefix, paths or (), tokenizer=tokenizer, max_bytes=max_bytes, console=new_console(stderr=True)
            )
        except OSError as error:
            raise ValueError(f"{error.filename or prefix}: cannot be read or written: {error.strerror}") from None
    counts = f"{done.documents:,} documents, {done.tokens:,} tokens from {done.files:,} files"
    typer.echo(f"{done.flags[1]}.bin, .idx, .json: {counts}; {done.skipped:,} skipped")
    typer.echo(f"To train on it:\n    {shlex.join(done.flags)}")
