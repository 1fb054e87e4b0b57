"""Text files to a Megatron dataset: files -> documents -> tokens -> Megatron's own writer -> renamed when complete."""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

ENDING = "_text_document"
"""Appended to the prefix, as by Megatron's own preprocessing."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Suffixes of files taken from folders."""
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
EOD = 256
"""End-of-document token where tokens are bytes."""
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
    skipped: int = 0  # documents without text; in Python's standard library also those not in UTF-8


def build(
    prefix: Path,
    paths: Sequence[Path] = (),
    *,
    tokenizer: str = "bytes",
    max_bytes: int | None = None,
    console: Console | None = None,
) -> Dataset:
    """Write PREFIX_text_document.{bin,idx,json}; they replace older ones when all are complete, the .json last.

    Args:
        paths: files and folders; none: the source of Python's standard library.
        tokenizer: ``bytes``, or ``huggingface:`` and a folder or a name on the hub.
        max_bytes: stop before the file that would exceed this total.
        console: shows progress.

    Raises:
        ValueError: for unreadable or empty sources, and a tokenizer that cannot be opened.
        OSError: for files that cannot be read or written.
    """
    files = find(paths, max_bytes)
    flags, vocabulary, end, encode = _open_tokenizer(tokenizer)
    path = Path(f"{prefix}{ENDING}")
    done = Dataset(flags=["--data-path", str(path), *flags], files=len(files), vocabulary=vocabulary)

    def documents() -> Iterator[list[int]]:
        for file in track(files, "", console=console, disable=console is None):
            for where, data in _read(file):
                try:
                    ids = encode(_text(data, line=file.suffix == ".jsonl"))
                except ValueError as error:
                    if paths:
                        raise ValueError(f"{where}: {error}") from None
                    ids = []
                if ids:
                    done.documents += 1
                    done.tokens += len(ids) + 1
                    yield [*ids, end]
                else:
                    done.skipped += 1

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        write(f"{folder}/new", documents(), vocabulary)
        if not done.documents:
            raise ValueError(f"{files[0]}: --tokenizer {tokenizer} finds no tokens in {len(files)} files")
        Path(folder, "new.json").write_text(json.dumps(asdict(done), indent=1), encoding="utf-8")
        for suffix in ("bin", "idx", "json"):
            os.replace(f"{folder}/new.{suffix}", f"{path}.{suffix}")
    return done


def write(prefix: str, documents: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Write PREFIX.{bin,idx} by Megatron's writer, one sequence a document; elements have 2 bytes if the vocabulary
    allows, else 4."""
    with warnings.catch_warnings(action="ignore"):  # of Megatron's, about libraries that nothing here needs
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # takes seconds
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    with closing(builder.data_file):
        for ids in documents:
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")


def find(paths: Sequence[Path], max_bytes: int | None = None) -> list[Path]:
    """The files in the order of the paths, within a folder sorted by name; without hidden ones and installed packages.

    ValueError for a path that is missing or without such files, OSError for a folder that cannot be read.
    """
    chosen, total = list[Path](), 0
    for path in paths or [STANDARD_LIBRARY]:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        files = sorted(_files(path, SUFFIXES if paths else (".py",))) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: no {', '.join(SUFFIXES)} file in it")
        for file in files:
            total += file.stat().st_size
            if max_bytes is not None and total > max_bytes:
                if not chosen:
                    raise ValueError(f"--max-bytes {max_bytes}: the first file, {file}, has {total} bytes; allow more")
                return chosen
            chosen.append(file)
    return chosen


def _files(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise error

    for root, folders, names in folder.walk(on_error=stop):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        yield from (root / name for name in names if name[0] != "." and Path(name).suffix in suffixes)


def _read(file: Path) -> Iterator[tuple[str, bytes]]:
    """A file's documents, the whole file or each line of a .jsonl: where it is, and its bytes."""
    with file.open("rb") as data:
        if file.suffix == ".jsonl":
            yield from ((f"{file}:{number}", line) for number, line in enumerate(data, 1) if line.strip())
        else:
            yield str(file), data.read()


def _text(data: bytes, *, line: bool) -> str:
    """A document's text in UTF-8; of a line of a .jsonl under the key ``text``."""
    if not line:
        return data.decode("utf-8-sig")
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        has = ", ".join(map(repr, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"no text under the key 'text' (it has {has or 'none'})")
    return entry["text"]


def _open_tokenizer(tokenizer: str) -> tuple[list[str], int, int, Callable[[str], list[int]]]:
    """Megatron's flags for training with a tokenizer, its number of ids, its end of document, and its encoder."""
    kind, _, model = tokenizer.partition(":")
    if tokenizer == "bytes":
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(EOD + 1)]
        return flags, EOD + 1, EOD, lambda text: list(text.encode())
    if kind != "huggingface" or not model:
        raise ValueError(f"--tokenizer {tokenizer}: choose bytes, or huggingface:NAME_OR_PATH")
    path = Path(model).expanduser()
    model = str(path.absolute()) if path.exists() else model
    try:
        from transformers import AutoTokenizer

        opened = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the libraries raise all kinds of errors for invalid files
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--tokenizer {tokenizer}: transformers cannot open it: {said[:400]}") from error
    if opened.eos_token_id is None:
        raise ValueError(f"--tokenizer {tokenizer}: it has no end-of-document token: choose another")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
    return flags, len(opened), opened.eos_token_id, partial(opened.encode, add_special_tokens=False)
