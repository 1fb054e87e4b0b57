"""Build a Megatron dataset from the source text of Python's own standard library: real text, on every machine.

    python examples/corpus.py out/stdlib                      -> out/stdlib_text_document.bin, .idx and .json
    python examples/corpus.py out/code --source my/project    any directory with *.py files
    python examples/corpus.py out/stdlib --max-bytes 4000000  the first files, up to 4 MB

One document per file, in the order of their paths, as the bytes that Megatron's byte-level tokenizer makes of them,
each with an end-of-document token behind it. The same source gives the same dataset. The files appear under their
names only when they are complete, the .json last; where it is there and names the same source, nothing is built again.

Megatron's command line offers no byte-level tokenizer to train with, and needs none: the tokens are in the dataset, and
`--tokenizer-type NullTokenizer` with the right `--vocab-size` declares them. The flags are printed, and in the .json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tokenize
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

EOD = 256  # the first id behind the 256 bytes
VOCABULARY = EOD + 1
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What a built dataset holds, and how to train on it; the contents of its .json file."""

    source: str
    python: str
    max_bytes: int | None
    documents: int
    tokens: int
    skipped: int
    """Files that are empty or not text in the encoding they declare."""
    vocabulary: int
    end_of_document: int
    flags: list[str]
    """For Megatron's command line, without the split."""


def main() -> int:
    """Build as the command line says; the exit status is 1, with one line of explanation, where that is impossible."""
    parser = argparse.ArgumentParser(description="Build a Megatron dataset from Python source text.")
    parser.add_argument("prefix", type=Path, help="where to: PREFIX_text_document.bin, .idx and .json")
    parser.add_argument("--source", type=Path, help="directory of *.py files (default: the standard library)")
    parser.add_argument("--max-bytes", type=int, help="stop before the file that would exceed this many bytes of text")
    chosen = parser.parse_args()
    source = chosen.source or Path(sysconfig.get_paths()["stdlib"])
    try:
        corpus = build(chosen.prefix, source, max_bytes=chosen.max_bytes)
    except (ValueError, OSError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    print(f"{corpus.documents} documents, {corpus.tokens} tokens, {corpus.skipped} files skipped. To train on them:")
    print("   ", " ".join(corpus.flags))
    return 0


def build(prefix: Path, source: Path, *, max_bytes: int | None = None) -> Corpus:
    """Build PREFIX_text_document.{bin,idx,json} from the *.py files under `source`, unless they are there already.

    Raises ValueError for a source that is no directory or has no text, and for a limit that admits no file; OSError for
    files that cannot be read or written.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"--max-bytes {max_bytes}: give a positive number of bytes, or leave it out")
    if not source.is_dir():
        raise ValueError(f"--source {source}: no such directory; give one that holds *.py files")
    path = f"{prefix}_text_document"
    if (done := _already_there(Path(f"{path}.json"), source, max_bytes)) is not None:
        return done
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = f"{path}.unfinished-{os.getpid()}"
    try:
        corpus = _write(unfinished, path, source, max_bytes)
        Path(f"{unfinished}.json").write_text(json.dumps(asdict(corpus), indent=1), encoding="utf-8")
        Path(f"{path}.json").unlink(missing_ok=True)  # never the old description with new data
        for suffix in ("bin", "idx", "json"):
            os.replace(f"{unfinished}.{suffix}", f"{path}.{suffix}")
    finally:
        for suffix in ("bin", "idx", "json"):
            Path(f"{unfinished}.{suffix}").unlink(missing_ok=True)
    return corpus


def training_flags(path: str) -> list[str]:
    """Megatron's flags for a dataset with this vocabulary, for the megatron-core that is installed."""
    from megatron.core.package_info import MAJOR, MINOR

    # The null tokenizer's --vocab-size counts the end-of-document token since 0.18; before, it came on top.
    size = VOCABULARY if (MAJOR, MINOR) >= (0, 18) else VOCABULARY - 1
    return ["--data-path", path, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]


def _already_there(description: Path, source: Path, max_bytes: int | None) -> Corpus | None:
    """The dataset as described, if it is complete and from this very source."""
    path = str(description).removesuffix(".json")
    with suppress(OSError, ValueError, TypeError):
        corpus = Corpus(**json.loads(description.read_text(encoding="utf-8")))
        same = (corpus.source, corpus.python, corpus.max_bytes) == (str(source.resolve()), sys.version, max_bytes)
        if same and os.path.getsize(f"{path}.bin") == 2 * corpus.tokens and os.path.exists(f"{path}.idx"):
            return corpus if corpus.flags == training_flags(path) else None
    return None


def _write(unfinished: str, path: str, source: Path, max_bytes: int | None) -> Corpus:
    files = _files(source, max_bytes)
    if not files:
        raise _no_text(source, max_bytes)
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers import MegatronTokenizer
    from rich.progress import track

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=VOCABULARY, _eos_id=EOD
    )
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=DType.optimal_dtype(VOCABULARY))
    documents = tokens = skipped = 0
    for file in track(files, description="tokenizing"):
        if text := _read(file):
            ids = [*tokenizer.tokenize(text), tokenizer.eod]
            builder.add_document(np.array(ids), [len(ids)])
            documents, tokens = documents + 1, tokens + len(ids)
        else:
            skipped += 1
    builder.finalize(f"{unfinished}.idx")
    if not documents:
        raise _no_text(source, max_bytes)
    return Corpus(
        source=str(source.resolve()),
        python=sys.version,
        max_bytes=max_bytes,
        documents=documents,
        tokens=tokens,
        skipped=skipped,
        vocabulary=VOCABULARY,
        end_of_document=EOD,
        flags=training_flags(path),
    )


def _no_text(source: Path, max_bytes: int | None) -> ValueError:
    limit = "" if max_bytes is None else f" within --max-bytes {max_bytes}"
    return ValueError(f"--source {source}: no *.py file with text in it{limit}; give another directory or limit")


def _files(source: Path, max_bytes: int | None) -> list[Path]:
    """The *.py files in the order of their paths, up to the first with which they would exceed the limit."""
    found = []
    for folder, subfolders, names in os.walk(source, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found.sort()
    if max_bytes is None:
        return found
    sizes = accumulate(file.stat().st_size for file in found)
    return [file for file, size in zip(found, sizes, strict=True) if size <= max_bytes]


def _raise(error: OSError) -> None:
    raise error


def _read(file: Path) -> str:
    """The text of a Python file in the encoding it declares; empty if it is not text in that encoding."""
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (SyntaxError, UnicodeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
