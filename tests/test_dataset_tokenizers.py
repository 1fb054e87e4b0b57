"""Datasets tokenized by Hugging Face, sentencepiece and tiktoken, as Megatron loads them; tiny ones, trained here."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cp_plugin.cli.app import app
from cp_plugin.megatron.dataset.build import build
from cp_plugin.megatron.dataset.recipe import Changed, Recipe
from cp_plugin.megatron.models import tokenizers
from cp_plugin.megatron.models.tokenizers import LIBRARIES, load, named, training_flags

TEXTS = {"a.txt": "def main():\n    return 'Grüße'\n", "b.txt": "hello world, hello again\n"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _hugging_face(folder: Path) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXTS.values(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>").save_pretrained(folder / "hf")
    return f"huggingface:{folder / 'hf'}"


def _sentencepiece(folder: Path) -> str:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS.values()),
        model_prefix=str(folder / "sp"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return f"sentencepiece:{folder / 'sp.model'}"


def _tiktoken(folder: Path) -> str:
    pieces = [bytes([i]) for i in range(256)] + [b"he", b"hel", b"hell", b"hello"]
    rows = [
        {"rank": i, "token_bytes": base64.b64encode(b).decode(), "token_str": b.decode(errors="replace")}
        for i, b in enumerate(pieces)
    ]
    (folder / "tok").mkdir(exist_ok=True)
    (folder / "tok" / "vocab.json").write_text(json.dumps(rows))
    return f"tiktoken:{folder / 'tok' / 'vocab.json'}"


MAKERS = {"huggingface": _hugging_face, "sentencepiece": _sentencepiece, "tiktoken": _tiktoken}


@pytest.fixture(params=MAKERS)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of each kind whose library is installed."""
    module = LIBRARIES[request.param].module
    pytest.importorskip(module, reason=f"{module} is not installed: {tokenizers.EXTRA}")
    return MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))


def test_documents_are_tokenized_as_the_training_does(spec: str, source: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    paths = tuple(source / name for name in TEXTS)
    done = build(source / "d", Recipe(paths=paths, tokenizer=named(spec)), workers=2, batch_bytes=1)
    dataset = IndexedDataset(f"{source}/d_text_document")
    parser = argparse.ArgumentParser()
    _add_tokenizer_args(parser)
    parser.add_argument("--data-path")
    args = parser.parse_args(done.flags)
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 1, 1
    trained = build_tokenizer(args)
    assert args.padded_vocab_size == done.vocabulary
    for i, text in enumerate(TEXTS.values()):
        ids = dataset[i].tolist()
        assert ids[-1] == trained.eod == done.end_of_document
        assert ids[:-1] == trained.tokenize(text) and trained.detokenize(ids[:-1]).strip() == text.strip()
    with pytest.raises(ValueError, match=f"--vocab-size 100: --tokenizer .* has {done.vocabulary} token ids"):
        build(source / "e", Recipe(paths=paths, tokenizer=named(spec)), vocab_size=100)


def test_a_training_on_bytes_has_257_ids(source: Path) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    flags = build(source / "d", Recipe(paths=(source / "a.txt",), tokenizer=named("bytes"))).flags
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    args = {"tokenizer_type": words["--tokenizer-type"], "vocab_size": int(words["--vocab-size"])}
    trained = build_tokenizer(SimpleNamespace(**args, pad_vocab_size=True, padded_vocab_size=257))
    assert (trained.vocab_size, trained.eod) == (257, tokenizers.EOD)


def test_changed_tokenizer_files_are_noticed(spec: str, source: Path) -> None:
    recipe = Recipe(paths=(source / "a.txt",), tokenizer=named(spec))
    build(source / "d", recipe)
    path = Path(named(spec).model)
    (path if path.is_file() else path / "added.txt").open("ab").write(b" ")
    with pytest.raises(Changed, match=r"the files of --tokenizer .* changed"):
        build(source / "d", recipe)


def test_megatrons_flags_for_tokenizers(spec: str, source: Path) -> None:
    kind = spec.partition(":")[0]
    more = {"huggingface": ["--tokenizer-hf-no-include-special-tokens"], "tiktoken": ["--tiktoken-pattern", "v1"]}.get(
        kind
    )
    if more:
        words = ["dataset", source / "d", source / "a.txt", "--tokenizer", spec, "--json", "--", *more]
        run = CliRunner().invoke(app, list(map(str, words)))
        assert run.exit_code == 0, run.output
        flags = json.loads(run.stdout)["flags"]
        assert " ".join(more) in " ".join(flags)
    with pytest.raises(ValueError, match="unrecognized arguments: --no-such"):
        load(named(spec, ["--no-such"]))
    (source / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="Megatron cannot open it"):
        load(named(f"{kind}:{source / 'x.json'}"))


def test_a_tokenizer_without_an_end_of_document(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tokenizers.Tokenizer(encode=lambda text: [1], vocabulary=9, end_of_document=None)
    monkeypatch.setattr(tokenizers, "load", lambda name: endless)
    recipe = Recipe(paths=(source / "a.txt",), tokenizer=named("bytes"))
    with pytest.raises(ValueError, match="it has no end-of-document token; add --no-append-eod"):
        build(source / "d", recipe)
    for eod in (None, -1):
        opened = tokenizers._opened(SimpleNamespace(eod=eod, vocab_size=9, tokenize=lambda text: [1]))
        assert opened.end_of_document is None


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_missing_library_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LIBRARIES[kind].module
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(ValueError, match=rf"{module} is not installed: pip install 'cp-plugin\[tokenizers\]'"):
        named(f"{kind}:{tmp_path}")


def test_names_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys)
    with pytest.raises(ValueError, match=r"write sentencepiece:FILE$"):
        named("sentencepiece")
    for missing in ("sentencepiece:nowhere.model", "huggingface:./nowhere"):
        with pytest.raises(ValueError, match="no such file"):
            named(missing)
    assert named("huggingface:org/name").model == "org/name"
    (tmp_path / "m.model").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert named("sentencepiece:m.model").model == str(tmp_path / "m.model")


def test_flags_for_bytes_count_the_vocabulary_as_each_megatron_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, size in (("0.17.1", "256"), ("0.18.2", "257"), ("0.19.2", "257")):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert training_flags(named("bytes"), 257) == ["--tokenizer-type", "NullTokenizer", "--vocab-size", size]
