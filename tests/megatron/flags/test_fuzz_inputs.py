"""Random command lines: each starts, or is refused in one line that names its cause.

    ci/fuzz.sh --examples N      so many of each kind; a few run with the other tests

What is accepted is read as written, and a training trains. Each kind runs in a fork, which keeps what Megatron's
validation leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
from command_strategies import command_lines, plugin_flags, plugin_parser, trainings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from warm import run_forked

from cp_plugin.tools.app import app

FUZZ = int(os.environ.get("CP_PLUGIN_FUZZ", "0"))
BY_DAY = {"commands": 60, "plugin's flags": 100, "Megatron's flags": 20, "trainings": 3}
"""The examples of each kind; at night all have the same number."""
SECONDS = 60
"""Of processor time, after which an example counts as hanging."""
# cp-plugin


WORK = (
    *("planner.search.answer", "planner.explain.explain", "tools.plan._reproduced", "tools.doctor.show"),
    *("testing.verify.with_progress", "tools.bench.run.question"),
)
"""Functions with which commands begin to work."""


class Started(Exception):
    """Raised where a command would start to work, after all its checks."""


def a_command(line: list[str]) -> str:
    with working_instead():
        ended = CliRunner().invoke(app, line)
    if isinstance(ended.exception, Started):
        return "started"
    assert ended.exception is None or isinstance(ended.exception, SystemExit), repr(ended.exception)
    assert ended.exit_code in (0, 1, 2) and "Traceback" not in ended.output, ended.output
    if ended.exit_code == 2:
        said = ended.stderr.splitlines()
        assert said and said[-1].startswith("error: "), f"refused without a line of its own: {ended.output!r}"
        parts = {part.strip(" -") for word in line for part in word.partition("=")[::2]} - {""}
        blank = any(word.endswith("=") or not word.strip() for word in line)
        named = "--" in said[-1] or "Missing argument" in said[-1] or any(part in said[-1] for part in parts)
        assert blank or named, f"no name: {said[-1]}"
        return "refused"
    if line[0] == "traffic" and ended.stdout.startswith("{"):
        told = json.loads(ended.stdout)["problem"]
        same_numbers(line, told | {"ranks": told["size"]})
    return "answered"


@contextmanager
def working_instead() -> Iterator[None]:
    """Stop commands where they would start ranks, compute references, search, or draw."""
    from cp_plugin.testing import launch

    def started(*_: object, **__: object) -> None:
        raise Started

    ranks = launch.run_ranks
    with ExitStack() as stack:
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get("run_ranks") is ranks:
                stack.enter_context(patch.object(module, "run_ranks", started))
        for work in WORK:
            stack.enter_context(patch(f"cp_plugin.{work}", started))
        stack.enter_context(patch("matplotlib.figure.Figure.savefig", started))
        stack.enter_context(patch("torch.cuda.device_count", lambda: 0))
        yield


def same_numbers(line: Sequence[str], held: Mapping[str, Any]) -> None:
    """AssertionError if a number was read as another one."""
    for flag, _, text in (word.partition("=") for word in line):
        name = flag.removeprefix("--").replace("-", "_")
        if text and isinstance(held.get(name), int):
            assert held[name] == int(text), f"{flag} was read as {held[name]}"


# Flags of trainings


def settings_as_written(drawn: tuple[list[str], int]) -> str:
    from cp_plugin.megatron.flags import args, option_flags

    line, size = drawn
    try:
        parsed = plugin_parser().parse_args(line)
        parsed.context_parallel_size, parsed.num_layers = size, 4
        parsed.recompute_granularity = parsed.hybrid_layer_pattern = None
        read = args.settings_from(parsed)
    except (ValueError, argparse.ArgumentError, SystemExit) as refused:
        assert len(str(refused)) > 1
        return "refused"
    typed = dict(word.partition("=")[::2] for word in line)
    shown = option_flags.shown(read.options)
    wrong = {n: shown[n] for n in typed.keys() & shown.keys() if typed[n] not in ("auto", "off", "none", shown[n])}
    if typed.get("--cp-provider", read.provider) != read.provider:
        wrong["--cp-provider"] = read.provider
    if read.active:
        own = {"--cp-check-every": str(read.check_every), "--cp-selfcheck": "once" if read.selfcheck else "off"}
        wrong |= {name: text for name, text in own.items() if typed.get(name, text) != text}
        wrong |= {"--cp-pad-sequence": ""} if read.pad_sequence != ("--cp-pad-sequence" in typed) else {}
    assert not wrong, f"read as {wrong}"
    return "accepted"


def validated(line: list[str]) -> str:
    """Sizes as written, after Megatron's and the plugin's validation."""
    from cp_plugin.megatron.planned import command as planned

    sizes = ("num_layers", "hidden_size", "num_attention_heads", "micro_batch_size", "context_parallel_size")
    error = os.dup(2)  # a validation closes it, and is meant for a fork of its own
    with patch.dict(os.environ, WORLD_SIZE="4"), patch.object(sys, "argv", sys.argv):
        sizes_read = planned.with_arguments(line, lambda args, _: {name: getattr(args, name) for name in sizes})
    os.dup2(error, 2)
    os.close(error)
    if isinstance(sizes_read, ValueError):
        assert len(str(sizes_read)) > 3 and "Traceback" not in str(sizes_read), sizes_read
        return "refused"
    same_numbers(line, sizes_read)
    return "accepted"


def started(line: list[str]) -> str:
    """One step on two ranks. An error of Megatron's own may end it, with a traceback that ends in Megatron's code."""
    from cp_plugin import pretrain_gpt
    from cp_plugin.engine.common import refusals

    def program() -> int:
        sys.argv = ["pretrain_gpt", "--nproc", "2", *line]
        return refusals.exit_status(pretrain_gpt.main)

    ended = run_forked(program, limit=2 * SECONDS)
    text = ended.stdout + ended.stderr
    file = rf'File "(?!.*/cuda_surface.py)(?:({os.path.dirname(pretrain_gpt.__file__)}/)|.*/megatron/)'
    innermost = [re.findall(file, error)[-1:] for error in re.split(r"(?m)^ranks? [\d, -]+: ", text)]
    assert not any(map(any, innermost)) and ended.returncode >= 0, f"status {ended.returncode}: {text[-3000:]}"
    if ended.returncode:
        assert innermost[1:] or re.search(r"^(cp_plugin|error): .{10}", text, re.MULTILINE), text[-3000:]
        return "refused"
    return "trained" if re.search(r"iteration +1/ +\d+ \|.*loss: ", text) else "ended"


KINDS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any], str]]] = {
    "commands": (command_lines, a_command),
    "plugin's flags": (plugin_flags, settings_as_written),
    "Megatron's flags": (trainings, validated),
    "trainings": (trainings, started),
}


def fuzz(kind: str, examples: int) -> None:
    """Print how the examples ended; AssertionError with one that is wrong."""
    make, check = KINDS[kind]
    outcomes: Counter[str] = Counter()

    def hangs(*_: object) -> None:
        raise RuntimeError(f"hangs for {SECONDS} s")

    @settings(max_examples=examples, derandomize=not FUZZ, database=None, suppress_health_check=list(HealthCheck))
    @given(make())
    def one(drawn: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        outcomes[check(drawn)] += 1
        signal.setitimer(signal.ITIMER_PROF, 0)

    signal.signal(signal.SIGPROF, hangs)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        one()
    print(f"{kind}: {dict(outcomes)}")


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_right_or_refused_in_one(kind: str, _cpu_megatron: None) -> None:
    ended = run_forked(lambda: fuzz(kind, FUZZ or BY_DAY[kind]), limit=100_000)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-9000:]
    print(ended.stdout)
    assert BY_DAY[kind] < 20 or ended.stdout.count("'") > 2, f"all alike: {ended.stdout}"


REFUSING = Mock(side_effect=ValueError("no"))
PLANTED: list[tuple[str, Any, str, str]] = [
    ("tools.traffic.price", lambda *_: 1 / 0, "traffic", "ZeroDivisionError"),
    (
        "tools.tables.asdict",
        lambda _: {"size": 4, "heads": 7},
        "traffic --provider=ring --json --heads=8",
        "heads was read as 7",
    ),
    ("engine.core.problem.Problem.__post_init__", REFUSING, "traffic --heads=8", "no name: error: no"),
    (
        "megatron.flags.option_flags.shown",
        lambda _: {"--cp-grid": "4x1"},
        "--cp-provider=attention2d --cp-grid=2x2",
        "read as {'--cp-grid':",
    ),
]
"""A function, a fault of it, a command or the plugin's flags on four ranks, and what is said of them."""


@pytest.mark.parametrize(("where", "fault", "line", "said"), PLANTED, ids=[where for where, *_ in PLANTED])
def test_a_planted_fault_is_found(where: str, fault: Any, line: str, said: str, _cpu_megatron: None) -> None:
    words = line.split()

    def check() -> str:
        return settings_as_written((words, 4)) if line.startswith("--") else a_command(words)

    def check_twice() -> None:
        check()
        with patch(f"cp_plugin.{where}", fault), pytest.raises(AssertionError) as raised:
            check()
        print(raised.value)

    ended = run_forked(check_twice)
    assert said in ended.stdout, ended.stdout + ended.stderr
