"""Build a Megatron dataset from the source text of Python's own standard library: real text, on every machine.

    python examples/corpus.py out/stdlib                      -> out/stdlib_text_document.bin, .idx and .json
    python examples/corpus.py out/code --source my/project    any directory with *.py files
    python examples/corpus.py out/stdlib --max-bytes 4000000  the first files, up to 4 MB

What `cp-plugin dataset` does without paths, for other examples to build on: one document per file, a token a byte, and
a dataset from another source is replaced without asking.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from cp_plugin.megatron.dataset.build import build as build_dataset
from cp_plugin.megatron.dataset.recipe import Changed, Description, Recipe
from cp_plugin.megatron.dataset.sources import standard_library
from cp_plugin.megatron.models.tokenizers import named


def main() -> int:
    """Build as the command line says; the exit status is 1, with one line of explanation, where that is impossible."""
    parser = argparse.ArgumentParser(description="Build a Megatron dataset from Python source text.")
    parser.add_argument("prefix", type=Path, help="where to: PREFIX_text_document.bin, .idx and .json")
    parser.add_argument("--source", type=Path, help="directory of *.py files (default: the standard library)")
    parser.add_argument("--max-bytes", type=int, help="stop before the file that would exceed this many bytes of text")
    chosen = parser.parse_args()
    try:
        corpus = build(chosen.prefix, chosen.source or standard_library(), max_bytes=chosen.max_bytes)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    skipped = corpus.empty + corpus.bad
    print(f"{corpus.documents} documents, {corpus.tokens} tokens, {skipped} files skipped. To train on them:")
    print("   ", shlex.join(corpus.flags))
    return 0


def build(prefix: Path, source: Path, *, max_bytes: int | None = None) -> Description:
    """Build PREFIX_text_document.{bin,idx,json} from the *.py files under `source`, unless they are there already.

    Raises ValueError, OSError and RuntimeError as `cp_plugin.megatron.dataset.build` does.
    """
    recipe = Recipe(paths=(source,), suffixes=(".py",), tokenizer=named("bytes"), skip_bad=True, max_bytes=max_bytes)
    console = Console(stderr=True)
    try:
        return build_dataset(prefix, recipe, console=console)
    except Changed:
        return build_dataset(prefix, recipe, console=console, fresh=True)


if __name__ == "__main__":
    sys.exit(main())
