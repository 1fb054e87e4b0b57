"""Datasets whose making is interrupted: the same bytes in the end, complete or not there, nothing mixed up."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from cp_plugin.cli.app import app
from cp_plugin.megatron.dataset import files, make, work
from cp_plugin.megatron.dataset.build import build
from cp_plugin.megatron.dataset.documents import SourceChanged
from cp_plugin.megatron.dataset.folder import PLAN, locked
from cp_plugin.megatron.dataset.recipe import Changed, Recipe
from cp_plugin.megatron.models import tokenizers
from cp_plugin.megatron.models.tokenizers import named

SHARD = 200
NAMES = [f"d_text_document.{suffix}" for suffix in ("bin", "idx", "json")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i % 7 + 1))
    return folder


def recipe(*paths: Path, **choices: object) -> Recipe:
    return Recipe(paths=paths, tokenizer=named("bytes"), **choices)  # type: ignore[arg-type]


def make_it(source: Path, out: Path, shard_bytes: int = SHARD, fresh: bool = False) -> None:
    build(out / "d", recipe(source), workers=2, shard_bytes=shard_bytes, fresh=fresh)


def contents(out: Path) -> list[bytes]:
    assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)
    return [(out / name).read_bytes().replace(str(out).encode(), b"OUT") for name in NAMES]


@pytest.fixture
def undisturbed(source: Path, tmp_path: Path) -> list[bytes]:
    make_it(source, tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


def forked(function: Callable[[], object], disturb: Callable[[int], None] = lambda child: None) -> int:
    """Run it in a process of its own; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            function()
            status = 0
        except SystemExit as leave:
            status = int(leave.code or 0)
        finally:
            os._exit(status)
    disturb(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_every_single_file_gets_its_name(
    source: Path, tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = get_context("fork").Value("i", 0)
    real, last = os.replace, 0

    def replace(old: str, new: str) -> None:
        with renamed.get_lock():
            renamed.value += 1
            now = renamed.value
        if now == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    for at in range(1, 100):
        renamed.value = 0
        out = tmp_path / str(at)
        status = forked(lambda out=out: make_it(source, out, 5 * SHARD))
        if status == 0:
            last = at
            break
        assert not (out / NAMES[2]).exists()
        make_it(source, out, 5 * SHARD)
        assert contents(out) == undisturbed, at
    assert last == 1 + 1 + 2 * 3 + 3, "behind the plan, three files of each of two shards, and those of the dataset"


def test_a_worker_that_is_killed_is_named_and_its_work_done_later(
    source: Path, tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, parent = tmp_path / "out", os.getpid()

    def die(path: str) -> None:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(files, "remove", die)
        with pytest.raises(RuntimeError, match=r"a worker process was killed, .* fewer --workers"):
            make_it(source, out)
    make_it(source, out)
    assert contents(out) == undisturbed


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tokenizing takes 10 ms a document."""
    honest = tokenizers.load(named("bytes"))

    def encode(text: str) -> list[int]:
        time.sleep(0.01)
        return honest.encode(text)

    slowed = tokenizers.Tokenizer(
        encode=encode, vocabulary=honest.vocabulary, end_of_document=honest.end_of_document, sample=honest.sample
    )
    monkeypatch.setattr(tokenizers, "load", lambda name: slowed)
    yield


@pytest.mark.usefixtures("slow")
def test_killed_at_random_moments(source: Path, tmp_path: Path, undisturbed: list[bytes]) -> None:
    out, draw, killed, partly = tmp_path / "out", random.Random(), 0, 0

    def kill(child: int) -> None:
        time.sleep(draw.uniform(0.01, 0.1 + 0.03 * killed))  # longer and longer, for machines with other work to do
        os.kill(child, signal.SIGKILL)

    while forked(lambda: make_it(source, out), kill) == -signal.SIGKILL:
        killed += 1
        partly += any(out.glob("*/shard-*.json"))
        complete = (out / NAMES[2]).exists()  # it gets its name last; killed behind that, only the folder is left over
        assert complete or not (out / NAMES[0]).exists() or any(out.glob(f"*/{PLAN}")), "named before it was complete"
        assert not complete or [(out / name).read_bytes() for name in NAMES[:2]] == undisturbed[:2]
    assert killed >= 2 and partly >= 1, f"killed {killed} times, {partly} of them with finished shards"
    assert contents(out) == undisturbed


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(
    source: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cp_plugin.megatron.dataset.shards.SMALLEST", SHARD)
    out = tmp_path / "out"
    words = ["dataset", str(out / "d"), str(source), "--workers", "2"]

    def interrupt(child: int) -> None:
        while not any(out.glob("*/shard-*.json")):
            time.sleep(0.005)
        os.kill(child, number)

    def command() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        app(words)

    assert forked(command, interrupt) == 128 + number
    assert not (out / NAMES[0]).exists() and any(out.glob(f"*/{PLAN}"))
    assert not list(out.glob("*/*.unfinished.*")), "what a worker had begun is removed"
    monkeypatch.undo()
    monkeypatch.setattr("cp_plugin.megatron.dataset.shards.SMALLEST", SHARD)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/shard-*.bin")}
    noted = []
    monkeypatch.setattr(make, "_say", lambda console, done, shards: noted.append(done))
    build(out / "d", recipe(source), workers=2)
    assert noted == [len(before)]
    build(tmp_path / "other" / "d", recipe(source), workers=1)
    assert contents(out) == contents(tmp_path / "other")


@pytest.fixture
def begun(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unfinished dataset: all shards are there, and joining them failed."""
    with monkeypatch.context() as patched:
        patched.setattr("cp_plugin.megatron.models.indexed.join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_it(source, tmp_path / "out")
    return tmp_path / "out"


def test_it_continues_with_what_is_missing_and_redoes_what_is_damaged(
    source: Path, begun: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = sorted(begun.glob("*/shard-*.bin"))
    shards[1].write_bytes(shards[1].read_bytes()[:-2])
    shards[2].with_suffix(".json").unlink()
    shards[3].with_suffix(".idx").unlink()
    noted = []
    monkeypatch.setattr(make, "_say", lambda console, done, shards: noted.append((done, shards)))
    make_it(source, begun)
    assert noted == [(len(shards) - 3, len(shards))]
    assert contents(begun) == undisturbed


def test_a_change_since_it_was_begun_is_named(source: Path, begun: Path) -> None:
    (source / "03.txt").write_text("other")
    with pytest.raises(Changed, match=r"03\.txt changed \(\d+ bytes then, 5 now\)\); start over with --fresh"):
        make_it(source, begun)
    (source / "03.txt").unlink()
    with pytest.raises(Changed, match=r"03\.txt is gone"):
        make_it(source, begun)
    with pytest.raises(Changed, match="--skip-bad: False then, True now"):
        build(begun / "d", recipe(source, skip_bad=True))
    make_it(source, begun, fresh=True)
    assert contents(begun)


def test_another_tokenizer_of_the_same_name_is_noticed(
    source: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = tokenizers.Tokenizer(encode=list, vocabulary=257, end_of_document=256, sample="another")  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizers, "load", lambda name: now)
    with pytest.raises(Changed, match="begun with another version of --tokenizer bytes"):
        make_it(source, begun)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipe": 1}', '{"x": 1}', "[" * 5000])
def test_a_plan_that_is_none_is_named(source: Path, begun: Path, undisturbed: list[bytes], text: str) -> None:
    (plan,) = begun.glob(f"*/{PLAN}")
    plan.write_text(text)
    with pytest.raises(ValueError, match=rf"^{plan} is not what cp-plugin dataset wrote: .*; start over with --fresh"):
        make_it(source, begun)
    make_it(source, begun, fresh=True)
    assert contents(begun) == undisturbed


@pytest.mark.parametrize("change", [{"documents": "40"}, {"tokens": -1}, {"x": 1}, {"flags": None}])
def test_a_description_that_is_none_is_not_trusted(
    source: Path, tmp_path: Path, undisturbed: list[bytes], change: dict[str, object]
) -> None:
    make_it(source, tmp_path / "out")
    path = tmp_path / "out" / NAMES[2]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    make_it(source, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_shards_without_a_plan_are_not_trusted(source: Path, begun: Path, undisturbed: list[bytes]) -> None:
    (folder,) = begun.iterdir()
    (folder / PLAN).unlink()
    for path in folder.glob("*.bin"):
        path.write_bytes(bytes(len(path.read_bytes())))
    make_it(source, begun)
    assert contents(begun) == undisturbed


def test_a_source_that_changes_while_it_is_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        (source / "05.txt").write_text("changed")
        return found

    real = make._checked
    monkeypatch.setattr(make, "_checked", checked)
    with pytest.raises(SourceChanged, match=r"05\.txt: changed while the dataset is built from it"):
        make_it(source, tmp_path / "out")


def test_two_at_the_same_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_plugin.megatron.dataset.folder._PATIENCE", 0.2)
    with (
        locked(tmp_path / "out" / "d_text_document.unfinished", keep=lambda: False),
        pytest.raises(ValueError, match="another process is building this dataset"),
    ):
        make_it(source, tmp_path / "out")


def test_a_full_disk_is_named_and_then_it_continues(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    room = 20_000  # bytes: enough for each shard and for the plan, not for the whole

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        app(["dataset", str(out / "d"), str(source), "--workers", "1"])

    for i in range(12):
        (source / f"long{i}.txt").write_text("x" * 1000)
    make_it(source, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    assert len(whole[0]) > room
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cp_plugin.megatron.dataset.shards.SMALLEST", SHARD)
        assert forked(limited) == 1
        assert "File too large; free some space, and the same command continues" in capfd.readouterr().err
        assert any(out.glob("*/shard-*.json")) and not any(out.glob("*/joined*"))
        build(out / "d", recipe(source))
    assert contents(out) == whole


def test_a_second_run_clears_up_what_the_first_could_not(
    source: Path, tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == PLAN:
            raise ZeroDivisionError
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(ZeroDivisionError):
            make_it(source, out)
    assert (out / NAMES[2]).exists() and any(out.glob(f"*/{PLAN}"))
    make_it(source, out)
    assert contents(out) == undisturbed


def test_workers_end_with_their_parent(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(work, "check", _hang)
    monkeypatch.setattr(sys.modules[__name__], "_begun", writing, raising=False)

    def kill(child: int) -> None:
        os.close(writing)
        assert os.read(reading, 4) == b"here"
        os.kill(child, signal.SIGKILL)

    assert forked(lambda: make_it(source, tmp_path / "out"), kill) == -signal.SIGKILL
    since = time.monotonic()
    while os.read(reading, 64):
        pass  # the end of the pipe comes when the last process that holds it is gone
    assert time.monotonic() - since < 20 < _HANGING
    os.close(reading)


_HANGING = 60.0


def _hang(job: work.Job, number: int, count: object) -> None:
    os.write(_begun, b"here")  # type: ignore[name-defined]  # noqa: F821
    time.sleep(_HANGING)
