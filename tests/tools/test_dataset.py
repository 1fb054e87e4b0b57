"""Datasets from text files: their documents, their order, their tokenizers, refusals, and what the command prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from commands import cp_plugin

from cp_plugin.megatron.dataset import build, find

EOD = 256
LINES = "\n\n".join(map(json.dumps, [{"text": "first\nline"}, {"text": "", "id": 2}, {"text": "Grüße 🙂", "body": 1}]))
CONTENTS = {
    "b.md": b"# b\r\n",
    "a/z.txt": "ä".encode(),
    "a.txt": b"",
    "x.tex": b"no",
    ".hidden.txt": b"no",
    "site-packages/p.txt": b"no",
    "c.jsonl": LINES.encode(),
}
IN_ORDER = ["ä", "# b\r\n", "first\nline", "Grüße 🙂"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def invoke(*words: object) -> tuple[int, str]:
    run = cp_plugin("dataset", *words)
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, run.output


def test_the_bytes_are_those_of_megatrons_writer(source: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "m_text_document.bin"), dtype=DType.optimal_dtype(EOD + 1))
    for text in IN_ORDER:
        builder.add_document(np.array([*text.encode(), EOD]), [len(text.encode()) + 1])
    builder.finalize(str(tmp_path / "m_text_document.idx"))
    for _ in range(2):  # the second replaces the first
        done = build(tmp_path / "new" / "d", [source])
        for suffix in ("bin", "idx"):
            megatrons, ours = (tmp_path / f"{name}_text_document.{suffix}" for name in ("m", "new/d"))
            assert megatrons.read_bytes() == ours.read_bytes()
        assert len(list((tmp_path / "new").iterdir())) == 3
    assert (done.files, done.documents, done.skipped) == (4, 4, 2)
    assert done.tokens == sum(len(text.encode()) + 1 for text in IN_ORDER)


def test_files_come_in_the_given_order(source: Path) -> None:
    paths = [source / "c.jsonl", source / "a", source / "x.tex"]
    assert [file.name for file in find(paths)] == ["c.jsonl", "z.txt", "x.tex"]
    sizes = [file.stat().st_size for file in find([source])]
    assert len(find([source], max_bytes=sum(sizes[:3]))) == 3


def test_unreadable_files_of_the_standard_library_are_skipped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cp_plugin.megatron.dataset.STANDARD_LIBRARY", source)
    (source / "bad.py").write_bytes(b"\xff")
    (source / "good.py").write_bytes(b"x")
    done = build(tmp_path / "d")
    assert (done.files, done.documents, done.skipped) == (2, 1, 1)


@pytest.mark.parametrize(
    ("words", "data", "complaint"),
    [
        ("{source}/bad.txt", b"ok\xff", "bad.txt: 'utf-8' codec can't decode byte 0xff in position 2"),
        ("{source}/bad.jsonl", b'{"text": "a"}\n\n{"text": \n', "bad.jsonl:3: not JSON: Expecting value"),
        ("{source}/bad.jsonl", b'{"txt": "a"}\n', "bad.jsonl:1: no text under the key 'text' (it has 'txt')"),
        ("{source}/bad.jsonl", b"[" * 100_000, "bad.jsonl:1: not JSON: "),
        ("/no/such", b"", "error: /no/such: no such file or folder"),
        ("{source}/a.txt", b"", "a.txt: --tokenizer bytes finds no tokens in 1 files"),
        ("{source} --tokenizer huggingface:{source}", b"", "transformers cannot open it"),
        ("{source} --max-bytes 1", b"", "--max-bytes 1: the first file"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_built(
    words: str, data: bytes, complaint: str, source: Path, tmp_path: Path
) -> None:
    if data:
        (source / words.rpartition("/")[2]).write_bytes(data)
    code, output = invoke(tmp_path / "d", *words.format(source=source).split())
    assert code == 2 and complaint in output and "Traceback" not in output
    assert not list(tmp_path.glob("*d_*"))


def test_the_command_prints_the_flags_and_the_description_has_them(source: Path, tmp_path: Path) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    code, output = invoke(tmp_path / "d", source)
    flags = f"--data-path {tmp_path}/d_text_document --tokenizer-type NullTokenizer --vocab-size 257"
    assert code == 0 and output.splitlines()[-1].strip() == flags
    assert "; 2 skipped" in output
    described = json.loads((tmp_path / "d_text_document.json").read_bytes())
    assert described["flags"] == flags.split()
    args = argparse.Namespace(
        tokenizer_type="NullTokenizer", vocab_size=257, pad_vocab_size=True, padded_vocab_size=257
    )
    assert build_tokenizer(args).eod == EOD


def hugging_face(folder: Path) -> str:
    """A tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'cp-plugin[tokenizers]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'cp-plugin[tokenizers]'")
    ids = {letter: n for n, letter in enumerate([*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    whole.save_pretrained(folder / "hf")
    return f"huggingface:{folder / 'hf'}"


def test_documents_are_tokenized_as_the_training_does(source: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    done = build(tmp_path / "d", [source], tokenizer=hugging_face(tmp_path))
    parser = argparse.ArgumentParser()
    _add_tokenizer_args(parser)
    parser.add_argument("--data-path")
    args = parser.parse_args(done.flags)
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 1, 1
    trained = build_tokenizer(args)
    assert args.padded_vocab_size == done.vocabulary
    for document, text in zip(IndexedDataset(f"{tmp_path}/d_text_document"), IN_ORDER, strict=True):
        *ids, end = document.tolist()
        assert end == trained.eod and ids == trained.tokenize(text) and trained.detokenize(ids).strip() == text.strip()


def test_a_tokenizer_without_an_end_of_document(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'cp-plugin[tokenizers]'")
    endless = argparse.Namespace(eos_token_id=None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: endless)
    with pytest.raises(ValueError, match="it has no end-of-document token"):
        build(tmp_path / "d", [source], tokenizer="huggingface:x")
