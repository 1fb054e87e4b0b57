"""Datasets from text files: their documents, their order, refusals, and what the command prints."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cp_plugin.cli.app import app
from cp_plugin.megatron.dataset.build import BATCH_BYTES, build
from cp_plugin.megatron.dataset.documents import read
from cp_plugin.megatron.dataset.recipe import Changed, Recipe
from cp_plugin.megatron.dataset.sources import find
from cp_plugin.megatron.models.tokenizers import EOD, named

LINES = "\n\n".join(map(json.dumps, [{"text": "first\nline"}, {"text": "", "id": 2}, {"text": "Grüße 🙂"}]))
CONTENTS = {
    "b.md": b"# b\r\n",
    "a/z.txt": "ä".encode(),
    "a.txt": b"",
    "x.tex": b"no",
    ".hidden.txt": b"no",
    "site-packages/p.txt": b"no",
    "c.jsonl": LINES.encode(),
    "d.txt.gz": gzip.compress(b"in gzip"),
    "e.jsonl.gz": gzip.compress(LINES.encode()),
}
IN_ORDER = ["ä", "# b\r\n", "first\nline", "Grüße 🙂", "in gzip", "first\nline", "Grüße 🙂"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def recipe(*paths: Path, **choices: object) -> Recipe:
    return Recipe(paths=paths, tokenizer=named("bytes"), **choices)  # type: ignore[arg-type]


def contents(prefix: Path, *suffixes: str) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in suffixes or ("bin", "idx")]


def invoke(*words: object) -> tuple[int, str]:
    run = CliRunner().invoke(app, ["dataset", *map(str, words)])
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, run.output


@pytest.mark.parametrize(("workers", "batch_bytes"), [(1, 1), (3, 1), (2, 20), (1, BATCH_BYTES)])
def test_the_bytes_are_those_of_megatrons_writer(source: Path, tmp_path: Path, workers: int, batch_bytes: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "m_text_document.bin"), dtype=DType.optimal_dtype(EOD + 1))
    for text in IN_ORDER:
        builder.add_document(np.array([*text.encode(), EOD]), [len(text.encode()) + 1])
    builder.finalize(str(tmp_path / "m_text_document.idx"))
    done = build(tmp_path / "new" / "d", recipe(source), workers=workers, batch_bytes=batch_bytes)
    assert contents(tmp_path / "new" / "d") == contents(tmp_path / "m")
    assert len(list((tmp_path / "new").iterdir())) == 3
    assert (done.files, done.documents, done.empty, done.bad) == (6, 7, 3, 0)
    assert done.tokens == sum(len(text.encode()) + 1 for text in IN_ORDER)
    assert done.without_text == [str(source / "a.txt")]


def test_without_end_tokens_and_with_another_key(source: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (source / "c.jsonl").write_text('{"body": "x", "text": 1}\n')
    build(tmp_path / "d", recipe(source / "c.jsonl", append_eod=False, json_key="body"))
    assert [document.tolist() for document in IndexedDataset(f"{tmp_path}/d_text_document")] == [[ord("x")]]


@pytest.mark.parametrize("packed", [False, True])
@settings(max_examples=50)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=8))
def test_every_line_is_one_document(tmp_path_factory: pytest.TempPathFactory, texts: list[str], packed: bool) -> None:
    path = tmp_path_factory.getbasetemp() / f"lines.jsonl{'.gz' * packed}"
    lines = b"\n".join(json.dumps({"text": text}).encode() for text in texts)
    path.write_bytes(gzip.compress(lines) if packed else lines)
    (source,) = find([path])
    found = list(read(source))
    assert [document.text("text") for document in found] == texts
    assert [document.where for document in found] == [f"{path}:{n}" for n in range(1, len(texts) + 1)]
    assert not texts or sum(document.size for document in found) == source.size


def test_files_come_in_the_given_order_and_only_once(source: Path) -> None:
    paths = [source / "c.jsonl", source / "a", source / "x.tex"]
    assert [Path(s.path).name for s in find(paths)] == ["c.jsonl", "z.txt", "x.tex"]
    with pytest.raises(ValueError, match=r"c\.jsonl: found twice"):
        find([source, source / "c.jsonl"])
    sizes = [s.size for s in find([source])]
    assert len(find([source], max_bytes=sum(sizes[:3]))) == 3


def test_python_files_are_read_in_their_declared_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# coding: latin1\nx = 'é'".encode("latin1"))
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfx = 1")
    texts = [document.text("text") for source in find([tmp_path]) for document in read(source)]
    assert texts == ["# coding: latin1\nx = 'é'", "x = 1"]


@pytest.mark.parametrize(
    ("name", "data", "complaint", "left"),
    [
        ("bad.txt", b"ok\xff", "bad.txt: not text in utf-8: byte 0xff at offset 2", 0),
        ("bad.py", b"# coding: klingon\n", "bad.py: declares an unknown encoding: klingon", 0),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', "bad.jsonl:3: not JSON: Expecting value at column", 1),
        ("bad.jsonl", b'{"txt": "a"}\n', "bad.jsonl:1: no key 'text' (it has 'txt'); choose with --json-key", 0),
        ("bad.jsonl", b'{"text": 3}\n', "bad.jsonl:1: the key 'text' holds a int, not text", 0),
        ("bad.jsonl", b"[1]\n", "bad.jsonl:1: a JSON list, not an object", 0),
        ("bad.jsonl", b'{"text": "\\ud800"}\n', "character 0 of the key 'text' is half of a surrogate pair", 0),
        ("bad.jsonl", b'{"text": "a\xff"}\n', "bad.jsonl:1: not text in utf-8: byte 0xff at offset 11", 0),
        ("bad.txt.gz", gzip.compress(b"cut short", mtime=0)[:-9], "bad.txt.gz: damaged gzip file", 0),
        ("bad.txt.gz", b"not gzip", "bad.txt.gz: damaged gzip file", 0),
        ("bad.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 3, mtime=0)[:-4], "bad.jsonl.gz:4: damaged gzip file", 3),
        ("bad.jsonl", b'{"text": "0123456789"}\n' * 40 + b"{}\n", "bad.jsonl:41: no key 'text' (it has none)", 40),
    ],
)
def test_unreadable_documents_are_named_and_nothing_is_built(
    source: Path, tmp_path: Path, name: str, data: bytes, complaint: str, left: int
) -> None:
    (source / name).write_bytes(data)
    with pytest.raises(ValueError) as error:
        build(tmp_path / "d", recipe(source), batch_bytes=8)
    assert complaint in str(error.value) and "--skip-bad" in str(error.value)
    assert not list(tmp_path.glob("d_*"))
    done = build(tmp_path / "d", recipe(source, skip_bad=True), batch_bytes=8)
    assert done.bad == 1 and complaint in done.unreadable[0]
    assert done.documents == len(IN_ORDER) + left


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        ("{out} /no/such", 2, "error: /no/such: no such file or folder"),
        ("{out} {source}/x.json", 2, "x.json: JSON is read from .jsonl"),
        ("{out} {source}/tex", 2, "no file with --suffix .txt,.md,.rst,.py,.jsonl in it; suffixes there: .tex (1)"),
        ("{out} {source} --suffix txt", 2, "--suffix txt: 'txt' is not a suffix; write suffixes with their dots"),
        ("{out} {source}/a.txt", 2, "a.txt: --tokenizer bytes finds no tokens in 1 files"),
        ("{out} {source} --vocab-size 256", 2, "--vocab-size 256: --tokenizer bytes has 257 token ids"),
        ("{out} {source} --tokenizer byte", 2, "--tokenizer byte: did you mean bytes"),
        ("{out} {source} --tokenizer bytes:x", 2, "the bytes tokenizer takes no file"),
        ("{out} {source} -- --vocab-file x", 2, "the bytes tokenizer takes no flags"),
        ("{out} {source} --max-bytes 1", 2, "--max-bytes 1: the first file"),
        ("{source}/a.txt/out {source}", 1, "error: cannot read or write"),
    ],
)
def test_bad_input_is_one_clear_line(words: str, status: int, complaint: str, source: Path, tmp_path: Path) -> None:
    (source / "tex").mkdir()
    (source / "tex" / "y.tex").write_text("y")
    (source / "x.json").write_text("{}")
    (source / "a" / "z.txt").write_text("more than a byte")
    code, output = invoke(*(word.format(out=tmp_path / "d", source=source) for word in words.split()))
    assert code == status and complaint in output and "Traceback" not in output
    assert not list(tmp_path.glob("d_*"))


def test_too_long_a_document_or_ids_beyond_the_vocabulary(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron.models import indexed, tokenizers

    monkeypatch.setattr(indexed, "LONGEST", 10)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: a document of 11 tokens; .* allows 10"):
        build(tmp_path / "d", recipe(source))
    monkeypatch.undo()
    vocabulary = tokenizers.load(named("bytes")).vocabulary
    wrong = tokenizers.Tokenizer(encode=lambda text: [999], vocabulary=vocabulary, end_of_document=EOD)
    monkeypatch.setattr(tokenizers, "load", lambda name: wrong)
    with pytest.raises(ValueError, match=r"z\.txt: the tokenizer returns the id 999, but claims to have 257 ids"):
        build(tmp_path / "e", recipe(source))


def test_nothing_is_built_twice_but_a_truncated_file_is_rebuilt(source: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"d_text_document.{suffix}" for suffix in ("bin", "idx", "json")]
    build(tmp_path / "d", recipe(source))
    first = [(p.read_bytes(), p.stat().st_mtime_ns) for p in paths]
    build(tmp_path / "d", recipe(source))
    assert [(p.read_bytes(), p.stat().st_mtime_ns) for p in paths] == first
    paths[0].write_bytes(b"cut short")
    build(tmp_path / "d", recipe(source))
    assert [p.read_bytes() for p in paths] == [content for content, _ in first]


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "text": (lambda s: (s / "b.md").write_text("another"), {}, "source files"),
    "new file": (lambda s: (s / "new.txt").write_text("new"), {}, "source files"),
    "key": (lambda s: None, {"json_key": "body"}, "--json-key: text then, body now"),
    "end": (lambda s: None, {"append_eod": False}, "--append-eod: True then, False now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_dataset_from_other_input_is_replaced_only_with_fresh(source: Path, tmp_path: Path, change: str) -> None:
    done = build(tmp_path / "d", recipe(source))
    happen, choices, complaint = CHANGES[change]
    happen(source)
    with pytest.raises(Changed) as error:
        build(tmp_path / "d", recipe(source, **choices))
    assert complaint in str(error.value) and "rebuild it with --fresh" in str(error.value)
    if "json_key" not in choices:
        assert build(tmp_path / "d", recipe(source, **choices), fresh=True).tokens != done.tokens


def test_the_command_prints_the_flags_and_the_description_has_them(source: Path, tmp_path: Path) -> None:
    code, output = invoke(tmp_path / "d", source, "--workers", 2)
    flags = f"--data-path {tmp_path}/d_text_document --tokenizer-type NullTokenizer --vocab-size 257"
    assert code == 0 and output.splitlines()[-1].strip() == flags
    assert "3 documents without text skipped:\n    " + str(source / "a.txt") in output
    described = json.loads(contents(tmp_path / "d", "json")[0])
    assert described["flags"] == flags.split()
    code, output = invoke(tmp_path / "d", source, "--json")
    assert code == 0 and json.loads(output) == described
