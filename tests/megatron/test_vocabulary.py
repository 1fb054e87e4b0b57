"""A dataset with more token ids than the model is refused before training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cp_plugin.megatron.models import vocabulary


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    (tmp_path / "d.json").write_text(json.dumps({"vocabulary": 257}))
    return str(tmp_path / "d")


@pytest.mark.parametrize("provider", ["", "--context-parallel-size 2 --cp-provider ring"])
def test_dataset_with_larger_vocabulary_is_refused(
    prefix: str, provider: str, validated: Callable[..., argparse.Namespace]
) -> None:
    data = f"--split 1,0,0 --data-path {prefix} {provider} --vocab-size"
    with pytest.raises(ValueError) as error:
        validated(f"{data} 256", ranks=2, without="--mock-data")
    assert str(error.value) == (
        f"--vocab-size 256: the model has 256 token ids, but the dataset {prefix} was built with 257: "
        f"{prefix}.json has the flags to train on it"
    )
    assert validated(f"{data} 257", ranks=2, without="--mock-data").vocab_size == 257


def args(**values: object) -> argparse.Namespace:
    files = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    plain = dict.fromkeys(("padded_vocab_size", *files, "data_args_path", "per_split_data_args_path"))
    return argparse.Namespace(**{**plain, "vocab_size": 256, "tokenizer_type": "NullTokenizer", **values})


def test_all_dataset_flags(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"0.3 elsewhere\n0.7 {prefix}\n")
    splits = {"train": "elsewhere", "valid": ["0.3", "elsewhere", "0.7", prefix], "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    for given in (
        {"data_path": ["0.5", "elsewhere", "0.5", prefix]},
        {"train_data_path": [prefix]},
        {"data_args_path": str(tmp_path / "list")},
        {"per_split_data_args_path": str(tmp_path / "splits.json")},
    ):
        with pytest.raises(ValueError, match="built with 257"):
            vocabulary.check(args(**given))
    with pytest.raises(ValueError, match="--padded-vocab-size 200: the model has 200"):
        vocabulary.check(args(data_path=[prefix], padded_vocab_size=200, tokenizer_type="HuggingFaceTokenizer"))


def test_unknown_vocabularies_are_accepted(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary.check(args())
    vocabulary.check(args(data_path=["1", str(tmp_path / "no description")]))
    vocabulary.check(args(data_path=[prefix], tokenizer_type="HuggingFaceTokenizer"))
    (tmp_path / "e.json").write_text("[]")
    vocabulary.check(args(data_path=[str(tmp_path / "e")]))
    monkeypatch.setattr(vocabulary, "megatron_version", lambda: "0.17.1")  # adds the end-of-document token
    vocabulary.check(args(data_path=[prefix]))
