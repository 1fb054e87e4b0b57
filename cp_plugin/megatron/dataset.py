"""Text files to a Megatron dataset: files -> documents -> tokens -> Megatron's own writer -> renamed when complete."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import sysconfig
import tempfile
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track

ENDING = "_text_document"
"""Appended to the prefix, as by Megatron's own preprocessing."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Default suffixes of files taken from folders, each also with ``.gz``."""
LINES, PACKED = (".jsonl", ".ndjson"), ".gz"
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
"""Python's own source: real text on every machine."""


@dataclass(slots=True, kw_only=True)
class Dataset:
    """A dataset's contents, as in the ``.json`` beside it."""

    flags: list[str]  # for Megatron's command line, without --split
    files: int
    vocabulary: int
    documents: int = 0
    tokens: int = 0  # including end-of-document tokens
    empty: int = 0  # skipped documents without text
    unreadable: list[str] = field(default_factory=list)  # skipped documents with reasons


def build(
    prefix: Path,
    paths: Sequence[Path],
    *,
    tokenizer: str = "bytes",
    suffixes: Sequence[str] = SUFFIXES,
    json_key: str = "text",
    append_eod: bool = True,
    skip_bad: bool = False,
    max_bytes: int | None = None,
    console: Console | None = None,
) -> Dataset:
    """Write PREFIX_text_document.{bin,idx,json}; they replace older ones when all are complete, the .json last.

    Args:
        tokenizer: ``bytes``, or ``huggingface:`` and a folder or a name on the hub.
        suffixes: of the files that are taken from folders.
        json_key: of the text in each line of a .jsonl file.
        skip_bad: skip unreadable documents, and list them.
        max_bytes: stop before the file that would exceed this total.
        console: shows progress.

    Raises:
        ValueError: for unreadable or empty sources, and a tokenizer that cannot be opened.
        OSError: for files that cannot be read or written.
    """
    files = find(paths, suffixes, max_bytes)
    with warnings.catch_warnings(action="ignore"):  # of Megatron's, about libraries that nothing here needs
        from cp_plugin.megatron.models import indexed  # imports Megatron, which takes seconds
    flags, vocabulary, end, encode = _opened(tokenizer, indexed.EOD)
    if append_eod and end is None:
        raise ValueError(f"--tokenizer {tokenizer}: it has no end-of-document token; add --no-append-eod")
    ends = [end] if append_eod and end is not None else []
    path = Path(f"{prefix}{ENDING}")
    done = Dataset(flags=["--data-path", str(path), *flags], files=len(files), vocabulary=vocabulary)

    def documents() -> Iterator[list[int]]:
        for file in track(files, "", console=console, disable=console is None):
            for where, data in read(file):
                try:
                    ids = encode(_text(file, data, json_key))
                except ValueError as error:
                    if not skip_bad:
                        raise ValueError(f"{where}: {error}: fix it, or skip such documents by --skip-bad") from None
                    done.unreadable.append(f"{where}: {error}")
                    continue
                done.empty += not ids
                if ids:
                    done.documents += 1
                    done.tokens += len(ids) + len(ends)
                    yield [*ids, *ends]

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        indexed.write(f"{folder}/new", documents(), vocabulary)
        if not done.documents:
            raise ValueError(f"{paths[0]}: --tokenizer {tokenizer} finds no tokens in {len(files)} files")
        Path(folder, "new.json").write_text(json.dumps(asdict(done), indent=1), encoding="utf-8")
        for suffix in ("bin", "idx", "json"):
            os.replace(f"{folder}/new.{suffix}", f"{path}.{suffix}")
    return done


def find(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, max_bytes: int | None = None) -> list[Path]:
    """The files in the order of the paths, within a folder sorted by name; without hidden ones and installed packages.

    Raises:
        ValueError: for a path that is missing or without such files.
        OSError: for a folder that cannot be read.
    """
    found, total = list[Path](), 0
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        files = sorted(_below(path, suffixes)) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: no file with --suffix {','.join(suffixes)} in it")
        for file in files:
            total += file.stat().st_size
            if max_bytes is not None and total > max_bytes:
                if not found:
                    raise ValueError(f"--max-bytes {max_bytes}: the first file, {file}, has {total} bytes; allow more")
                return found
            found.append(file)
    return found


def read(file: Path) -> Iterator[tuple[str, bytes]]:
    """A file's documents, the whole file or each line of a .jsonl: where it is, and its bytes.

    Raises:
        ValueError: for a damaged gzip file.
    """
    try:
        with gzip.open(file) if file.suffix == PACKED else file.open("rb") as data:
            if _suffix(file) in LINES:
                yield from ((f"{file}:{number}", line) for number, line in enumerate(data, 1) if line.strip())
            else:
                yield str(file), data.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: damaged gzip file ({error})") from None


def _below(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        yield from (Path(root, name) for name in names if name[0] != "." and _suffix(Path(name)) in suffixes)


def _suffix(file: Path) -> str:
    return Path(file.name.removesuffix(PACKED)).suffix


def _text(file: Path, data: bytes, key: str) -> str:
    """A document's text: under the key of a line's object; in UTF-8, or in the encoding that a Python file declares."""
    if _suffix(file) in LINES:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(found, dict) or not isinstance(found.get(key), str):
            has = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"no text under the key {key!r} (it has {has or 'none'}); choose with --json-key")
        return found[key]
    try:
        python = _suffix(file) == ".py"
        return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0] if python else "utf-8-sig")
    except SyntaxError as error:
        raise ValueError(str(error)) from None


def _opened(tokenizer: str, eod: int) -> tuple[list[str], int, int | None, Callable[[str], list[int]]]:
    """Megatron's flags for training with a tokenizer, its number of ids, its end of document, and its encoder."""
    kind, _, model = tokenizer.partition(":")
    if tokenizer == "bytes":
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(eod + 1)]
        return flags, eod + 1, eod, lambda text: list(text.encode())
    if kind != "huggingface" or not model:
        raise ValueError(f"--tokenizer {tokenizer}: choose bytes, or huggingface:NAME_OR_PATH")
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    path = Path(model).expanduser()
    model = str(path.absolute()) if path.exists() else model
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
    _add_tokenizer_args(parser := argparse.ArgumentParser())
    args = parser.parse_args(flags)
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 1, 1
    try:
        opened = build_tokenizer(args)
    except Exception as error:  # the libraries raise all kinds of errors for invalid files
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--tokenizer {tokenizer}: Megatron cannot open it: {said[:400]}") from error
    end = opened.eod if opened.eod is not None and 0 <= opened.eod < opened.vocab_size else None
    return flags, opened.vocab_size, end, opened.tokenize
