"""Random command lines and questions: each starts, or is refused in one line that names its cause.

    ci/fuzz.sh --examples N      so many of each kind; a few run with the other tests

Flags, choices and numbers are those that the parsers declare. What is accepted is read as written, a training trains,
and one question has one answer. Each kind runs in a fork, which keeps what Megatron's validation leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import harness
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_planned import Case
from typer.testing import CliRunner
from warm import in_a_fork

from cp_plugin.cli.app import app
from cp_plugin.methods import registry as providers

FUZZ = int(os.environ.get("CP_PLUGIN_FUZZ", "0"))
BY_DAY = {"commands": 60, "plugin's flags": 100, "Megatron's flags": 20, "trainings": 3, "questions": 3}
"""The examples of each kind; at night all have the same number."""
SECONDS = 60
"""Of processor time, after which an example counts as hanging."""
NUMBERS = ("1", "2", "4", "8", "64", "0")
ODD = ("0", "-1", "1e3", "2.5", "", " ", "auto", "none", "4x", "0x2", "04", "¾", "٣", "9" * 30, "nan", "inf", "1e-300")
NAMES: Mapping[str, Sequence[str]] = {
    "provider": (*providers.names(), *providers.names("linear")),
    "linear-provider": providers.names("linear"),
    "layout": ("contiguous", "zigzag", "striped", "documents"),
    "dtype": ("float32", "bfloat16", "float16"),
    "backend": ("auto", "sdpa", "reference", "triton"),
    "mask": ("causal", "full"),
    "grid": ("2x2", "1x4", "4x1", "2x4"),
    "model": ("llama3.2-1b", "linear-llama3-1b", "llama3-8b"),
    "cluster": ("dgx-h100", "dgx-a100", "none.toml"),
    "documents": ("chat", "24,14,10", "x"),
    "recompute": ("none", "selective", "full"),
    "linear-attention": ("basic", "gla", "rebased"),
    "layer-pattern": ("L", "LLN", "N"),
    "fp8": ("off", "comm", "compute"),
    "backward": ("kv", "q"),
    "selfcheck": ("once", "off"),
    "device": ("auto", "cpu", "cuda"),
    "plot": ("x.svg", "x.gif", "/none/x.svg"),
    "window-size": ("4,0", "(4,0)", "(4"),
    "spec": ("local", "x y"),
    "hybrid-layer-pattern": ("M*-M*-", "*-", "M*E/M*", "M*|GM*-"),
}
"""Usual values of flags for which no choices are declared."""
NAMED = ("moe-router-topk", "log-interval", "eval-iters", "data-path")
OFTEN = (
    *(*NAMED, "eval-interval", "train-iters", "micro-batch-size", "global-batch-size", "seq-length"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "bf16", "fp16"),
    *("window-size", "softmax-type", "recompute-granularity", "recompute-num-layers", "sequence-parallel", "sft"),
    *("moe-router-load-balancing-type", "attention-dropout", "mtp-num-layers", "dataloader-inter-document-masking"),
    *("eod-mask-loss", "calculate-per-token-loss", "optimizer", "use-distributed-optimizer"),
)
"""Megatron's flags that are drawn most often, and more often than all others together."""
Flags = dict[str, st.SearchStrategy[str | None]]


def value(flag: str, choices: Sequence[Any] = (), usual: Sequence[str] = NUMBERS) -> st.SearchStrategy[str]:
    """Mostly a usual one."""
    own = NAMES.get(flag.removeprefix("--").removeprefix("cp-"), usual)
    some = st.sampled_from([*map(str, choices)] or own)
    return st.integers(0, 15).flatmap(
        lambda n: st.sampled_from(ODD) if n == 0 else st.text(max_size=4) if n == 1 else some
    )


def some(flags: Flags, most: int) -> st.SearchStrategy[dict[str, str | None]]:
    """Some of the flags, each with a value; None for a switch."""
    chosen = st.lists(st.sampled_from(sorted(flags)), unique=True, max_size=most)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: flags[name] for name in names}))


def spelled(values: Mapping[str, str | None]) -> list[str]:
    return [flag if text is None else f"{flag}={text}" for flag, text in values.items()]


def of_parser(parser: argparse.ArgumentParser) -> Flags:
    """What a parser declares, by the first name of each flag."""
    usual = {float: ("0.1", "1", "0"), str: ("x", "local"), None: ("x", "/none/x")}
    return {
        action.option_strings[0]: st.none()
        if action.nargs == 0
        else value(action.option_strings[0], action.choices or (), usual.get(action.type, NUMBERS))
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }


# cp-plugin


class Started(Exception):
    """Raised where a command would start to work, after all its checks."""


@cache
def commands() -> dict[str, Flags]:
    """The flags of every command of ``cp-plugin``."""
    found: dict[str, Flags] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = {}
        for option in command.params:
            listed = re.fullmatch(r"\[(.*\|.*)\]", option.metavar or "")
            usual = NUMBERS if option.metavar in ("N", "X") else ("x.json", "x", "/none/x.toml")
            choices = listed[1].split("|") if listed else ()
            if option.opts[0].startswith("--"):
                switch = getattr(option, "is_flag", False)
                found[name][option.opts[0]] = st.none() if switch else value(option.opts[0], choices, usual)
    return found


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted(commands())))
    flags, given = commands()[name], draw(some(commands()[name], 5))
    for needed in ("--provider", "--model", "--cluster", "--plot"):  # without them most are refused, or try everything
        if needed in flags and draw(st.integers(0, 7)):
            given[needed] = draw(flags[needed])
    words = draw(st.lists(st.sampled_from(["x.toml", "striped-16", "none", "/", "--", "--lr"]), max_size=2))
    return [name, *words, *spelled(given)] if draw(st.booleans()) else [name, *spelled(given), *words[:1]]


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
        parts = [part for word in line for part in word.partition("=")[::2]]
        assert "--" in said[-1] or any(part.strip(" -") in said[-1] for part in parts), f"no name: {said[-1]}"
        return "refused"
    if line[0] == "traffic" and ended.stdout.startswith("{"):
        told = json.loads(ended.stdout)["problem"]
        same_numbers(line, told | {"ranks": told["size"]})
    return "answered"


@contextmanager
def working_instead() -> Iterator[None]:
    """Stop commands where they would start ranks, search, or draw."""
    from cp_plugin.testing import launch

    def started(*_: object, **__: object) -> None:
        raise Started

    ranks = launch.run_ranks
    with ExitStack() as stack:
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get("run_ranks") is ranks:
                stack.enter_context(patch.object(module, "run_ranks", started))
        for work in ("planner.search.answer", "planner.explain.explain", "cli.plan._reproduced", "cli.doctor.show"):
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


@cache
def plugin_parser() -> argparse.ArgumentParser:
    from cp_plugin.megatron.flags import args

    return args.add_arguments(argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False))


@st.composite
def plugin_flags(draw: st.DrawFn) -> tuple[list[str], int]:
    flags = of_parser(plugin_parser())
    given = draw(some(flags, 4))
    if draw(st.integers(0, 7)):
        given = {"--cp-provider": draw(flags["--cp-provider"])} | given
    return spelled(given), draw(st.integers(1, 16))


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
    given = dict(word.partition("=")[::2] for word in line)
    shown = option_flags.shown(read.options)
    wrong = {n: shown[n] for n in given.keys() & shown.keys() if given[n] not in ("auto", "off", "none", shown[n])}
    if given.get("--cp-provider", read.provider) != read.provider:
        wrong["--cp-provider"] = read.provider
    if read.active:
        own = {"--cp-check-every": str(read.check_every), "--cp-selfcheck": "once" if read.selfcheck else "off"}
        wrong |= {name: text for name, text in own.items() if given.get(name, text) != text}
        wrong |= {"--cp-pad-sequence": ""} if read.pad_sequence != ("--cp-pad-sequence" in given) else {}
    assert not wrong, f"read as {wrong}"
    return "accepted"


BASE = shlex.split(f"{harness.MODEL} {harness.DATA} {harness.SGD} --train-iters 1 --attention-backend unfused")


@cache
def megatron_flags() -> tuple[Flags, Flags]:
    """Those that are drawn often, and all others."""
    from megatron.training.arguments import add_megatron_arguments

    found = of_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    found |= of_parser(plugin_parser())
    often = {flag: found[flag] for name in OFTEN if (flag := f"--{name}") in found}
    often |= {flag: x for flag, x in found.items() if flag.startswith("--cp-")}
    return often, {flag: x for flag, x in found.items() if flag not in often}


@st.composite
def trainings(draw: st.DrawFn) -> list[str]:
    """A command line: the usual one without a flag, and with others."""
    often, rest = megatron_flags()
    words = [word for word in BASE if word.startswith("--")]
    gone = set(draw(st.lists(st.sampled_from([*words, *["--mock-data", "--eval-interval"] * 9]), max_size=1)))
    kept, skipping = [], False
    for word in BASE:
        skipping = word in gone if word.startswith("--") else skipping
        kept += [] if skipping else [word]
    experts = ["--num-experts", "4", "--moe-router-topk", "2"] if draw(st.booleans()) else []
    given = draw(some({f"--{name}": often[f"--{name}"] for name in NAMED}, 1)) | draw(some(often, 2))
    given |= draw(some(rest, 2)) if draw(st.booleans()) else {}
    given = {"--context-parallel-size": "2", "--cp-provider": draw(st.sampled_from(providers.names()))} | given
    return [*kept, *experts, *spelled(given)]


def validated(line: list[str]) -> str:
    """Sizes as written, after Megatron's and the plugin's validation."""
    from cp_plugin.megatron.planned import command as planned

    sizes = ("num_layers", "hidden_size", "num_attention_heads", "micro_batch_size", "context_parallel_size")
    with undone():
        os.environ["WORLD_SIZE"] = "4"
        found = planned.with_arguments(line, lambda args, _: {name: getattr(args, name) for name in sizes})
    if isinstance(found, planned.Refused):
        assert len(found.message) > 3 and "Traceback" not in found.message, found.message
        return "refused"
    same_numbers(line, found)
    return "accepted"


@contextmanager
def undone() -> Iterator[None]:
    """Take back what a validation does to this process, which is meant for a fork of its own."""
    error, words, environment = os.dup(2), sys.argv, dict(os.environ)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        sys.argv = words
        os.environ.clear()
        os.environ |= environment


def started(line: list[str]) -> str:
    """One step on two ranks."""
    from cp_plugin import pretrain_gpt
    from cp_plugin.common import refusals

    def program() -> int:
        sys.argv = ["pretrain_gpt", "--nproc", "2", *line]
        return refusals.exit_status(pretrain_gpt.main)

    ended = in_a_fork(program, limit=2 * SECONDS)
    text = ended.stdout + ended.stderr
    assert "Traceback" not in text and ended.returncode >= 0, f"status {ended.returncode}: {text[-3000:]}"
    if ended.returncode:
        assert re.search(r"^(cp_plugin|error): .{10}", text, re.MULTILINE), text[-3000:]
        return "refused"
    return "trained" if re.search(r"iteration +1/ +\d+ \|.*loss: ", text) else "ended"


# The planner


def one_answer(drawn: tuple[int, int]) -> str:
    """By a model's name, and by Megatron's flags in any order and spelling."""
    from cp_plugin.megatron.planned import command as planned

    case, flags = Case.drawn(drawn[0]), Case.drawn(drawn[0])._replace(window=0).flags
    pairs = re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(flags))
    random.Random(drawn[1]).shuffle(pairs)
    again = " ".join(re.sub(r"^(--\S+) (\S+)$", r"\1=\2", pair) for pair in pairs).split()
    common = ["plan", "--json", "--cluster=dgx-h100", f"--devices={case.devices}"]
    common += [f"--memory={case.memory:g}"] * bool(case.memory) + [f"--documents={case.documents}"] * bool(
        case.documents
    )
    named = [f"--model={case.name}", f"--seq-length={case.tokens}", f"--recompute={case.recompute}"]
    named += [f"--tensor={case.tensor}", f"--pipeline={case.pipeline}", f"--context={case.context}"]
    named += [f"--global-batch={case.data}"]
    with patch.object(planned, "run_ranks", in_this_process), undone():
        ways = [CliRunner().invoke(app, [*common, *way]) for way in (named, ["--", *flags], ["--", *again])]
    first, *others = ((done.exit_code, done.stdout and json.loads(done.stdout)) for done in ways)
    assert first[0] in (0, 1, 2), ways[0].output
    for other, done in zip(others, ways[1:], strict=True):
        assert other[0] == first[0], f"status {other[0]}, not {first[0]}: {done.output[-500:]}"
        assert first[0] == 2 or other[1]["methods"] == first[1]["methods"], f"another answer by {flags}"
    if first[0] < 2:
        best = first[1]["methods"][0]
        assert best["fits"] == (first[0] == 0), "the exit status says whether it fits"
    return ("fits", "fits not", "refused")[first[0]]


def in_this_process(function: Callable[..., Any], ranks: int, *, args: Any, env: Any, timeout: float) -> list[Any]:
    os.environ |= env
    with undone():
        return [function(*args)]


KINDS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any], str]]] = {
    "commands": (command_lines, a_command),
    "plugin's flags": (plugin_flags, settings_as_written),
    "Megatron's flags": (trainings, validated),
    "trainings": (trainings, started),
    "questions": (lambda: st.tuples(st.integers(0, 10**6), st.integers(0, 9)), one_answer),
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
    ended = in_a_fork(lambda: fuzz(kind, FUZZ or BY_DAY[kind]), limit=100_000)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-9000:]
    print(ended.stdout)
    assert BY_DAY[kind] < 20 or ended.stdout.count("'") > 2, f"all alike: {ended.stdout}"


CAN_BE_DRAWN: dict[str, Callable[[str], object]] = {
    "more experts for a token than there are": lambda line: re.search(
        "--num-experts 4 .*--moe-router-topk=(8|64)", line
    ),
    "a division by zero": lambda line: "--log-interval=0" in line,
    "evaluation without its interval": lambda line: "--eval-iters" in line and "--eval-interval" not in line,
    "no data": lambda line: "data" not in line,
    "data that are not there": lambda line: "--data-path=/none/x" in line,
    "a flag that nobody listed": lambda line: set(re.findall(r"--[^ =]+", line)) & megatron_flags()[1].keys(),
}


def test_inputs_of_known_faults_can_be_drawn(_cpu_megatron: None) -> None:
    lines: list[str] = []
    quiet = {"database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    settings(max_examples=400, derandomize=True, **quiet)(
        given(trainings())(lambda line: lines.append(" ".join(line)))
    )()
    assert {name: any(map(drawn, lines)) for name, drawn in CAN_BE_DRAWN.items()} == dict.fromkeys(CAN_BE_DRAWN, True)


PLANTED: dict[str, tuple[str, Any, Callable[[], str], str]] = {
    "a traceback": ("testing.traffic.price", lambda *_: 1 / 0, lambda: a_command(["traffic"]), "ZeroDivisionError"),
    "another size": (
        *("cli.tables.asdict", lambda _: {"size": 4, "heads": 7}),
        *(lambda: a_command(["traffic", "--provider=ring", "--json=-", "--heads=8"]), "heads was read as 7"),
    ),
    "no name": (
        *("core.problem.Problem.__post_init__", Mock(side_effect=ValueError("no"))),
        *(lambda: a_command(["traffic", "--heads=8"]), "no name: error: no"),
    ),
    "another option": (
        *("megatron.flags.option_flags.shown", lambda _: {"--cp-grid": "4x1"}),
        *(
            lambda: settings_as_written((["--cp-provider=attention2d", "--cp-grid=2x2"], 4)),
            "read as {'--cp-grid': '4x1'}",
        ),
    ),
    "a status": ("planner.search.Plan.fits", lambda *_: False, lambda: one_answer((3, 0)), "the exit status"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, _cpu_megatron: None) -> None:
    where, planted, check, said = PLANTED[fault]

    def found() -> None:
        check()
        with patch(f"cp_plugin.{where}", planted), pytest.raises(AssertionError) as raised:
            check()
        print(raised.value)

    ended = in_a_fork(found)
    assert said in ended.stdout, ended.stdout + ended.stderr
