"""The example dataset: Python files, and another source replaces it without asking. The rest: test_dataset.py."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

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


def test_it_has_python_files_alone_and_leaves_out_the_unreadable(source, tmp_path):
    built = corpus.build(tmp_path / "c", source)
    assert (built.documents, built.empty, built.bad) == (2, 1, 1)
    assert built.tokens == len("".join(TEXTS[name] for name in ("a/z.py", "b.py")).encode()) + 2
    assert json.loads((tmp_path / "c_text_document.json").read_text())["flags"] == built.flags


def test_another_source_or_limit_replaces_it(source, tmp_path):
    first = corpus.build(tmp_path / "c", source)
    assert corpus.build(tmp_path / "c", source) == first
    assert corpus.build(tmp_path / "c", source, max_bytes=9).documents == 1
    (source / "c.py").write_text("z = 2")
    assert corpus.build(tmp_path / "c", source).documents == 3


def test_the_training_flags_declare_this_vocabulary(source, tmp_path):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    flags = corpus.build(tmp_path / "c", source).flags
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    assert Path(words["--data-path"] + ".bin").exists()
    args = argparse.Namespace(
        tokenizer_type=words["--tokenizer-type"],
        vocab_size=int(words["--vocab-size"]),
        pad_vocab_size=True,
        padded_vocab_size=257,  # given, so that it is not padded
    )
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == 257 and tokenizer.eod == 256


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--source", "/no/such/folder"], "corpus: /no/such/folder: no such file or folder"),
        (["--max-bytes", "0"], "--max-bytes 0: give a positive number"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, complaint, source, tmp_path):
    words = arguments if "--source" in arguments else [*arguments, "--source", source]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", _PATH, tmp_path / "c", *words], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert complaint in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
    assert not list(tmp_path.glob("c_*"))
