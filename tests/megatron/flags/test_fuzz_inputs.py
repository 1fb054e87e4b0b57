"""Random command lines of trainings: each trains, or is refused in one line that names its cause.

    ci/fuzz.sh --examples N      so many of each kind; a few run with the other tests

The plugin's flags are read as written. Each kind runs in a fork, which keeps what Megatron's validation leaves behind.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from command_strategies import plugin_flags, plugin_parser, trainings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warm import run_forked

FUZZ = int(os.environ.get("CP_PLUGIN_FUZZ", "0"))
BY_DAY = {"plugin's flags": 100, "trainings": 3}
"""The examples of each kind; at night all have the same number."""
SECONDS = 60
"""Of processor time, after which an example counts as hanging."""


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
    "plugin's flags": (plugin_flags, settings_as_written),
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


def test_a_planted_fault_is_found(_cpu_megatron: None) -> None:
    line = ["--cp-provider=attention2d", "--cp-grid=2x2"]

    def check_twice() -> None:
        settings_as_written((line, 4))
        read = patch("cp_plugin.megatron.flags.option_flags.shown", lambda _: {"--cp-grid": "4x1"})
        with read, pytest.raises(AssertionError, match=r"read as \{'--cp-grid':"):
            settings_as_written((line, 4))

    ended = run_forked(check_twice)
    assert ended.returncode == 0, ended.stdout + ended.stderr
