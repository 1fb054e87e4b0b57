"""The example dataset: what is in it is the text, it is the same every time, and it is complete or not there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_PATH = Path(__file__).parents[1] / "examples" / "corpus.py"
_SPEC = importlib.util.spec_from_file_location("corpus", _PATH)
corpus = importlib.util.module_from_spec(_SPEC)
sys.modules["corpus"] = corpus
_SPEC.loader.exec_module(corpus)

TEXTS = {"b.py": "x = 1\n", "a/z.py": "y = 'é'\n", "a.py": "", "note.txt": "no", "site-packages/p.py": "no"}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bad.py").write_bytes(b"# coding: utf-8\n\xff\xfe")
    return folder


def _documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(f"{prefix}_text_document")
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [np.array(dataset[i]) for i in range(len(dataset))]  # copies: the file is unmapped with the dataset


def test_documents_are_the_files_as_bytes_with_an_end_token(source, tmp_path):
    built = corpus.build(tmp_path / "out" / "c", source)
    documents = _documents(tmp_path / "out" / "c")
    assert [list(d) for d in documents] == [[*TEXTS[n].encode(), corpus.EOD] for n in ("a/z.py", "b.py")]
    assert built.documents == 2 and built.skipped == 2 and built.tokens == sum(map(len, documents))


def test_the_training_flags_declare_this_vocabulary(source, tmp_path):
    import argparse

    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    flags = corpus.build(tmp_path / "c", source).flags
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    assert Path(words["--data-path"] + ".bin").exists()
    args = argparse.Namespace(
        tokenizer_type=words["--tokenizer-type"],
        vocab_size=int(words["--vocab-size"]),
        pad_vocab_size=True,
        padded_vocab_size=corpus.VOCABULARY,  # given, so that it is not padded
    )
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == corpus.VOCABULARY and tokenizer.eod == corpus.EOD


def test_same_source_same_bytes_and_nothing_built_twice(source, tmp_path):
    files = [tmp_path / f"c_text_document.{suffix}" for suffix in ("bin", "idx", "json")]
    corpus.build(tmp_path / "c", source)
    first = [(f.read_bytes(), f.stat().st_mtime_ns) for f in files]
    corpus.build(tmp_path / "c", source)
    assert [(f.read_bytes(), f.stat().st_mtime_ns) for f in files] == first
    files[0].write_bytes(b"cut short")
    corpus.build(tmp_path / "c", source)
    assert [f.read_bytes() for f in files] == [content for content, _ in first]
    assert corpus.build(tmp_path / "c", source, max_bytes=14).documents == 1


def test_a_limit_keeps_whole_files(source, tmp_path):
    assert corpus.build(tmp_path / "c", source, max_bytes=9).documents == 1
    assert [len(d) for d in _documents(tmp_path / "c")] == [len(TEXTS["a/z.py"].encode()) + 1]


def test_an_interrupted_build_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_read", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        corpus.build(tmp_path / "c", source)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--source", "/no/such/folder"], "--source /no/such/folder: no such directory"),
        (["--max-bytes", "0"], "--max-bytes 0: give a positive number"),
        (["--max-bytes", "3"], "within --max-bytes 3"),
        (["--source", "{empty}"], "no *.py file with text"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, complaint, source, tmp_path):
    (tmp_path / "empty").mkdir()
    words = [w.format(empty=tmp_path / "empty") for w in arguments]
    if "--source" not in words:
        words += ["--source", source]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", _PATH, tmp_path / "c", *words], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert complaint in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
    assert not list(tmp_path.glob("c_*"))


def test_the_description_is_json(source, tmp_path):
    built = corpus.build(tmp_path / "c", source)
    described = json.loads((tmp_path / "c_text_document.json").read_text())
    assert described["flags"] == built.flags and described["tokens"] == built.tokens
