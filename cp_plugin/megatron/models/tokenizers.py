"""Megatron's tokenizers by short names, and the flags for training with the same one.

bytes                    one token per byte; training only needs the size of the vocabulary
huggingface:NAME_OR_PATH transformers' AutoTokenizer
sentencepiece:FILE       a model of sentencepiece
tiktoken:FILE            a vocabulary in Megatron's .json form of tiktoken's
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cp_plugin.common.names import did_you_mean
from cp_plugin.megatron import compat

EOD = 256
"""End-of-document token of ``bytes``."""
EXTRA = "pip install 'cp-plugin[tokenizers]'"
_TIKTOKEN_DEFAULT = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The library behind a kind of tokenizer."""

    flag: str
    """Its ``--tokenizer-type`` in Megatron."""
    module: str
    """The Python package that Megatron imports for it."""


LIBRARIES = {
    "huggingface": Library(flag="HuggingFaceTokenizer", module="transformers"),
    "sentencepiece": Library(flag="GPTSentencePieceTokenizer", module="sentencepiece"),
    "tiktoken": Library(flag="TikTokenizer", module="tiktoken"),
}
KINDS = ("bytes", *LIBRARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A tokenizer as named by the user, not yet opened."""

    kind: str
    model: str = ""
    """A file or folder, absolute, or a name on the Hugging Face hub; empty for ``bytes``."""
    more: tuple[str, ...] = ()
    """Further flags of Megatron's for tokenizers."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.model}" if self.model else self.kind

    def identity(self) -> str:
        """A digest of its local files; empty where it has none."""
        path = Path(self.model)
        if not self.model or not path.exists():
            return ""
        files = [path] if path.is_file() else sorted(p for p in path.iterdir() if _part_of_tokenizer(p))
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """An opened tokenizer."""

    encode: Callable[[str], list[int]]
    vocabulary: int
    """Number of ids, including special ones."""
    end_of_document: int | None


def named(text: str, more: Sequence[str] = ()) -> Name:
    """Parse the value of ``--tokenizer``.

    more: Megatron's flags that follow ``--``.

    Raises:
        ValueError: for an unknown kind, a missing file or library, and flags with ``bytes``.
    """
    kind, _, model = text.partition(":")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        choose = f"{hint} Choose" if hint else ": choose"
        raise ValueError(
            f"--tokenizer {text}{choose} one of bytes, huggingface:NAME_OR_PATH, sentencepiece:FILE, tiktoken:FILE"
        )
    if kind == "bytes":
        if model or more:
            wrong = "flags after --; leave them out" if more else "file; write --tokenizer bytes"
            raise ValueError(f"--tokenizer {text}: the bytes tokenizer takes no {wrong}")
        return Name(kind=kind)
    if not model:
        raise ValueError(f"--tokenizer {text}: write {kind}:{'NAME_OR_PATH' if kind == 'huggingface' else 'FILE'}")
    library = LIBRARIES[kind]
    if importlib.util.find_spec(library.module) is None:
        raise ValueError(f"--tokenizer {text}: {library.module} is not installed: {EXTRA}")
    path = Path(model).expanduser()
    if path.exists():
        model = str(path.absolute())
    elif kind != "huggingface" or model.startswith((".", "/", "~")):
        raise ValueError(f"--tokenizer {text}: no such file")
    return Name(kind=kind, model=model, more=tuple(more))


def training_flags(name: Name, vocabulary: int) -> list[str]:
    """Megatron's flags for data of this tokenizer, for the installed megatron-core."""
    if name.kind == "bytes":
        counted = compat.counts_end_of_document(importlib.metadata.version("megatron-core"))
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary if counted else vocabulary - 1)]
    flags = ["--tokenizer-type", LIBRARIES[name.kind].flag, "--tokenizer-model", name.model, *name.more]
    if name.kind == "tiktoken" and "--vocab-size" not in name.more:
        flags += ["--vocab-size", str(vocabulary)]
    return flags


def load(name: Name) -> Tokenizer:
    """Open the tokenizer with Megatron's own builder.

    Raises:
        ValueError: for flags that Megatron's tokenizers do not have, and where Megatron cannot open it.
    """
    if name.kind == "bytes":
        from megatron.core.tokenizers import MegatronTokenizer

        metadata = {"library": "byte-level"}
        return _opened(MegatronTokenizer.from_pretrained(metadata_path=metadata, vocab_size=EOD + 1, _eos_id=EOD))
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        opened = _opened(build_tokenizer(_parsed(name)))
        logging.getLogger("transformers").setLevel(logging.ERROR)  # warns of texts longer than the model's context
        return opened
    except Exception as error:  # the libraries raise all kinds of errors for invalid files
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--tokenizer {name}: Megatron cannot open it: {said[:400]}") from error


def _parsed(name: Name) -> argparse.Namespace:
    """The namespace from which Megatron builds a tokenizer."""
    from megatron.training.arguments import _add_tokenizer_args

    parser = _Parser(prog="--tokenizer", allow_abbrev=False, add_help=False)
    _add_tokenizer_args(parser)
    size = _tiktoken_size(name, parser) if name.kind == "tiktoken" else 0
    args = parser.parse_args(training_flags(name, size))
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 1, 1
    return args


def _tiktoken_size(name: Name, parser: argparse.ArgumentParser) -> int:
    """Megatron's default vocabulary size, or that of the file with special tokens, if smaller."""
    special = parser.parse_args(list(name.more)).tiktoken_num_special_tokens
    return min(_TIKTOKEN_DEFAULT, len(json.loads(Path(name.model).read_bytes())) + special)


def _opened(tokenizer: Any) -> Tokenizer:
    end = tokenizer.eod
    return Tokenizer(
        encode=tokenizer.tokenize,
        vocabulary=tokenizer.vocab_size,
        end_of_document=end if end is not None and 0 <= end < tokenizer.vocab_size else None,
    )


def _part_of_tokenizer(path: Path) -> bool:
    """Whether a file in a model's folder does not hold weights."""
    return path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; only Megatron's tokenizer flags may follow --")
