"""Shared by the parts of ``fuzz_inputs.py``: strategies for words a user may write, and checks of the answers."""

from __future__ import annotations

import copy
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

import typer
from click.testing import CliRunner
from hypothesis import strategies as st

from cp_plugin.cli.app import app
from cp_plugin.methods import registry as providers

Outcome = Literal["accepted", "refused"]
SECONDS = 30
"""Processor time for one input, after which it counts as hanging."""
_BORDERS = re.compile(r"[\s│╭╮╰╯─]+")


class Found(Exception):
    """A traceback, a wrong acceptance, a refusal that names nothing, or a hang."""


class Stopped(Exception):
    """Raised where a command would start to work, after all its checks."""


def stopped_at(function: str) -> AbstractContextManager[Any]:
    """Stop a command at a function, given by its full name; the mock's ``call_args`` has the arguments."""
    return patch(function, side_effect=Stopped)


class Hangs(BaseException):
    """Out of time. Not an ``Exception``, so that no handler on the way catches it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input."""

    name: str
    share: int
    """Relative to the other kinds' shares."""
    check: Callable[..., Outcome]
    """Try one input; raises Found."""
    inputs: tuple[st.SearchStrategy[Any], ...]
    """Strategies for the arguments of ``check``."""


USUAL = 24
"""Weight of usual words against each sort of odd ones: many combinations of five flags must be accepted."""
ODD = (
    *("0", "-1", "1e3", "2.5", "", " ", "auto", "none", "4x", "2x4", "0x2"),
    *("04", "¾", "٣", "²", "9" * 30, "nan", "inf"),
)
"""Almost numbers, where a whole number is required."""


def numbers(*usual: int) -> st.SearchStrategy[str]:
    """Values of an integer flag, mostly usual ones."""
    some = st.sampled_from([str(n) for n in usual])
    return st.one_of(*[some] * USUAL, st.integers(-2, 70).map(str), st.sampled_from(ODD), st.text(max_size=4))


def names(*usual: str) -> st.SearchStrategy[str]:
    """Values of a flag that takes a name, mostly usual ones."""
    some = st.sampled_from(usual)
    others = (some.map(str.upper), st.sampled_from(["", "auto", "rng"]), st.text(max_size=6))
    return st.one_of(*[some] * USUAL, *others)


PROVIDERS = names(*providers.names(), *providers.names("linear"), "upstream")
GRIDS = st.one_of(
    *[st.sampled_from(["2x2", "1x4", "4x1", "2x4"])] * USUAL,
    st.sampled_from(["2X2", "2x", "x2", "2x2x2", "-1x-4", "0x0", "02x2", "2x²", "٢x٢"]),
    numbers(2),
)
OPTIONS: dict[str, st.SearchStrategy[str]] = {
    "--grid": GRIDS,
    "--head-parallel": numbers(1, 2),
    "--intra-size": numbers(1, 2, 4),
    "--head-groups": numbers(1, 2),
    "--backward": names("kv", "q", "auto"),
    "--fp8": names("off", "comm", "compute"),
    "--gradient-dtype": names("float32", "model"),
}
"""Method options shared by several commands."""
LAYOUTS = names("contiguous", "zigzag", "striped")
DTYPES = names("float32", "bfloat16", "float16", "float64", "int8")
VALUES = st.one_of(
    *[st.sampled_from([1e9, 2e12, 5e-6, 0.0, 1, 2, 8, 16, 128, 4096])] * 5,
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-2, 9),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["8", "1e9", "dgx-h100", "h100-80gb-sxm", "nan"]),
    st.sampled_from([[], {}, [1], [[1]], {"a": 1}, {"latency_s": 0.0, "bytes_per_s": 1e9}]),
)
"""Wrong values for a key of a file; None: the key is removed."""
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=3)


def words(flags: Mapping[str, st.SearchStrategy[str]], at_most: int = 5) -> st.SearchStrategy[dict[str, str]]:
    """Some of the flags, each with a value."""
    return st.lists(st.sampled_from(sorted(flags)), unique=True, max_size=at_most).flatmap(
        lambda chosen: st.fixed_dictionaries({name: flags[name] for name in chosen})
    )


def spelled(flags: Mapping[str, str]) -> list[str]:
    """As words of a command line; switches have the value None."""
    return [name if value is None else f"{name}={value}" for name, value in flags.items()]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    stopped: bool
    """Whether it reached the point where it starts to work."""

    @property
    def outcome(self) -> Outcome:
        return "refused" if not self.stopped and self.status == 2 else "accepted"


def call(line: Sequence[str], statuses: Sequence[int] = (0, 1, 2)) -> Ended:
    """Run ``cp-plugin`` in this process; Found for a traceback, or a refusal that names nothing."""
    with patch("torch.cuda.device_count", lambda: 0):  # Megatron's stand-in on the CPU says otherwise
        ended = CliRunner().invoke(_command(), list(line))
    error = ended.exception
    if isinstance(error, Stopped):
        return Ended(0, ended.stdout, stopped=True)
    if error is not None and not isinstance(error, SystemExit):
        raise Found(f"cp-plugin {line}: {''.join(traceback.format_exception(error))}")
    if "Traceback" in ended.output:
        raise Found(f"cp-plugin {line}: {ended.output}")
    if ended.exit_code not in statuses:
        raise Found(f"cp-plugin {line}: status {ended.exit_code}: {ended.output}")
    if ended.exit_code == 2 and not names_something(line, ended.stderr):
        raise Found(f"cp-plugin {line}: refused without a name: {ended.stderr}")
    return Ended(ended.exit_code, ended.stdout, stopped=False)


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def declared_flags(command: str) -> list[str]:
    """The flags of a command of ``cp-plugin``."""
    return [parameter.opts[0] for parameter in _command().commands[command].params]


def names_something(line: Sequence[str], message: str) -> bool:
    """Whether a message, however it is wrapped, names a flag or a value of this command line (or a word is empty)."""
    text = _BORDERS.sub("", message).replace("_", "-")
    if "--" in text or not all(map(str.strip, line)) or any(repr(word) in message for word in line[1:]):
        return True
    parts = [part for word in line[1:] for part in (word.removeprefix("--").partition("=")[0], word.partition("=")[2])]
    parts += line[1:]
    given = [part for part in (_BORDERS.sub("", part).replace("_", "-").rstrip("/") for part in parts) if part]
    return any(
        f"'{part}'" in text or repr(part) in text or f"error:{part}:" in text or (len(part) > 1 and part in text)
        for part in given
    )


def same_numbers(line: Sequence[str], flags: Mapping[str, str], held: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Found if an integer flag was read as another number. ``fields``: keys of ``held``, named as the flags."""
    for field in fields:
        text = flags.get(f"--{field.replace('_', '-')}")
        if text is not None and (not _is_whole(text) or held[field] != int(text)):
            raise Found(f"cp-plugin {line}: {field} was read as {held[field]}")


def same_options(line: Sequence[str], flags: Mapping[str, str], chosen: Mapping[str, Any]) -> None:
    """Found if a method's option was read differently than written; ``chosen``: the options as words."""
    for flag in OPTIONS:
        text, got = flags.get(flag), chosen.get(flag.removeprefix("--").replace("-", "_"))
        if text is None or got is None or text in ("auto", "off", "float32"):
            continue
        want = "x".join(str(int(n)) for n in text.split("x")) if flag == "--grid" else text.strip()
        if str(got) != (str(int(want)) if _is_whole(want) else want):
            raise Found(f"cp-plugin {line}: {flag} was read as {got}")


def _is_whole(text: str) -> bool:
    try:
        return int(text) >= 0
    except ValueError:
        return False


@contextmanager
def at_most(seconds: int = SECONDS) -> Iterator[None]:
    """Raise Hangs after that much processor time, repeatedly: an exception within a destructor is lost."""

    def over(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def altered(base: Mapping[str, Any], changes: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """A copy of a table with some values replaced, and some keys removed or unknown."""
    table = copy.deepcopy(dict(base))
    for which, value in changes:
        _put(table, which, copy.deepcopy(value))
    return table


def _put(table: dict[str, Any], which: int, value: Any) -> None:
    if not table or which % 17 == 16:
        table[f"unknown-{which % 5}"] = 1 if value is None else value
        return
    keys = sorted(table, key=str)
    key = keys[which % len(keys)]
    if isinstance(table[key], dict) and which % 5:
        _put(table[key], which // len(keys), value)
    elif value is None:
        del table[key]
    else:
        table[key] = value


def same(written: Any, held: Any) -> bool:
    """Whether a value was read as written: equal numbers or both NaN, and a boolean only for a boolean."""
    if isinstance(written, Mapping) and isinstance(held, Mapping):
        return all(same(value, held.get(key)) for key, value in written.items())
    if isinstance(written, list) and isinstance(held, list | tuple):
        return len(written) == len(held) and all(map(same, written, held))
    if written != written:
        return bool(held != held)
    return written == held and isinstance(written, bool) == isinstance(held, bool)
