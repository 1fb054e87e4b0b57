"""Datasets whose building is disturbed: complete or absent, never mixed, and the reason named."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from cp_plugin.cli.app import app
from cp_plugin.megatron.dataset import build as building
from cp_plugin.megatron.dataset.build import build
from cp_plugin.megatron.dataset.documents import Document, SourceChanged
from cp_plugin.megatron.dataset.recipe import Changed, Recipe
from cp_plugin.megatron.models.tokenizers import named

NAMES = [f"d_text_document.{suffix}" for suffix in ("bin", "idx", "json")]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i % 7 + 1))
    return folder


def make_it(source: Path, out: Path, **choices: object) -> None:
    recipe = Recipe(paths=(source,), tokenizer=named("bytes"), **choices)  # type: ignore[arg-type]
    build(out / "d", recipe, workers=2, batch_bytes=200)


def contents(out: Path) -> list[bytes]:
    """Of the finished dataset; leftovers of a killed process are hidden files under other names."""
    assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == sorted(NAMES)
    return [(out / name).read_bytes().replace(str(out).encode(), b"OUT") for name in NAMES]


@pytest.fixture
def undisturbed(source: Path, tmp_path: Path) -> list[bytes]:
    make_it(source, tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


def forked(function: Callable[[], object], disturb: Callable[[int], None] = lambda child: None) -> int:
    """Run a function in a process of its own; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except SystemExit as leave:
            status = int(leave.code or 0)
        finally:
            os._exit(status)
    disturb(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_each_rename(
    source: Path, tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    for at in range(3):
        out, renamed = tmp_path / str(at), iter(range(3))

        def replace(old: str, new: str, at: int = at, renamed: object = renamed) -> None:
            if next(renamed) == at:  # type: ignore[call-overload]
                os.kill(os.getpid(), signal.SIGKILL)
            real(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            assert forked(lambda out=out: make_it(source, out)) == -signal.SIGKILL
        assert not (out / NAMES[2]).exists()
        make_it(source, out)
        assert contents(out) == undisturbed, at


def _begun(out: Path) -> None:
    while not any(out.glob(".d_text_document.*/dataset.bin")):
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_nothing_behind(
    source: Path, out: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = Document.text

    def slow(document: Document, key: str) -> str:
        time.sleep(0.1)  # still building when the signal comes
        return text(document, key)

    def interrupt(child: int) -> None:
        _begun(out)
        os.kill(child, number)

    def command() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        app(["dataset", str(out / "d"), str(source), "--workers", "2"])

    monkeypatch.setattr(Document, "text", slow)
    assert forked(command, interrupt) == 128 + number
    assert list(out.iterdir()) == [] and "interrupted; nothing was built" in capfd.readouterr().err


def test_workers_end_with_their_parent(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    begin, text = building._begin, Document.text

    def slow(document: Document, key: str) -> str:
        time.sleep(60 if "/10." in document.where else 0.05)
        return text(document, key)

    def begins(parent: int, job: object) -> None:
        begin(parent, job)  # type: ignore[arg-type]
        os.write(writing, b"here")

    def kill(child: int) -> None:
        os.close(writing)
        assert os.read(reading, 4) == b"here"
        _begun(out)
        os.kill(child, signal.SIGKILL)

    monkeypatch.setattr(Document, "text", slow)
    monkeypatch.setattr(building, "_begin", begins)
    assert forked(lambda: make_it(source, out), kill) == -signal.SIGKILL
    since = time.monotonic()
    while os.read(reading, 64):
        pass  # the pipe ends when the last process that holds it is gone
    assert time.monotonic() - since < 20
    os.close(reading)


def test_a_killed_worker_is_named(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Document, "text", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"a worker process was killed, .* fewer --workers"):
        make_it(source, out)
    assert list(out.iterdir()) == []


def test_a_full_disk_is_named(source: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        app(["dataset", str(out / "d"), str(source), "--workers", "1"])

    for i in range(12):
        (source / f"long{i}.txt").write_text("x" * 1000)
    assert forked(limited) == 1
    assert "File too large; free some space, and start again" in capfd.readouterr().err
    assert list(out.iterdir()) == []


def test_a_source_that_changes_while_it_is_read(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*arguments: object) -> object:
        sources = real(*arguments)  # type: ignore[arg-type]
        (source / "05.txt").write_text("changed")
        return sources

    real = building.find
    monkeypatch.setattr(building, "find", found)
    with pytest.raises(SourceChanged, match=r"05\.txt: changed while the dataset was being built from it; start again"):
        make_it(source, out)


@pytest.mark.parametrize("alike", [True, False])
def test_two_at_the_same_time(
    source: Path, out: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Both write up to publication; the second finds the dataset of the first."""
    context, real = get_context("fork"), building._published
    both, ends = context.Barrier(2), context.SimpleQueue()

    def published(*arguments: object) -> object:
        both.wait(60)
        return real(*arguments)  # type: ignore[arg-type]

    def one(skip_bad: bool) -> None:
        try:
            make_it(source, out, skip_bad=skip_bad)
            ends.put("built")
        except Changed as error:
            ends.put(str(error))

    monkeypatch.setattr(building, "_published", published)
    processes = [context.Process(target=one, args=(skip and not alike,)) for skip in (False, True)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    first, second = sorted((ends.get(), ends.get()), key=len)
    assert contents(out)[:2] == undisturbed[:2]
    assert first == "built"
    assert second == "built" if alike else "--skip-bad: " in second and "rebuild it with --fresh" in second


@pytest.mark.parametrize("change", [{"documents": "40"}, {"tokens": -1}, {"x": 1}, {"flags": None}])
def test_an_invalid_description_is_not_trusted(
    source: Path, out: Path, undisturbed: list[bytes], change: dict[str, object]
) -> None:
    make_it(source, out)
    path = out / NAMES[2]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    make_it(source, out)
    assert contents(out) == undisturbed
