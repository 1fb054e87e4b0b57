"""One vocabulary and one style for all commands, found by looking at the program itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from enum import StrEnum
from functools import partial
from typing import Any, get_args

import pytest
import typer
from commands import cp_plugin
from warm import run_forked

from cp_plugin import __version__
from cp_plugin.engine.common.names import did_you_mean
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.methods import registry as providers
from cp_plugin.tools.app import app

PROGRAM: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {name: command.load() for name, command in PROGRAM.commands.items()}
EVERY = [(name, param) for name, command in COMMANDS.items() for param in command.params]


def kind(param: Any) -> type:
    """What a value is read as."""
    annotation = param.type_descriptor.annotation
    return (get_args(annotation) or (annotation,))[0]


@pytest.mark.parametrize(("command", "param"), EVERY, ids=lambda x: x if isinstance(x, str) else str(x.name))
def test_a_parameter_has_a_help_text(command: str, param: Any) -> None:
    assert param.help and not param.help.endswith(".") and "``" not in param.help, param.help


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_the_help_fits(command: str, flag: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)  # read once, when the module is imported
    shown = cp_plugin(*filter(None, [command]), flag, columns=width)
    assert shown.exit_code == 0 and f"Usage: cp-plugin {command}".strip() in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= width and not re.search("…|``", shown.stdout)


def test_completion_is_typers() -> None:
    names = {opt for param in PROGRAM.params for opt in param.opts}
    assert {"--install-completion", "--show-completion"} <= names
    env = {**os.environ, "_CP_PLUGIN_COMPLETE": "complete_bash", "COMP_WORDS": "cp-plugin ver", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cp_plugin.tools"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["verify"]


@pytest.mark.parametrize("words", ["--help", "--version", "--show-completion", "verfy", "--hlep"])
def test_the_program_alone_imports_no_command(words: str) -> None:
    code = (
        "import sys\nfrom cp_plugin.tools.app import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: ours = sorted(m for m in sys.modules if m.startswith('cp_plugin'))\n"
        "print(*ours, file=sys.stderr)\nassert 'torch' not in sys.modules and len(ours) <= 12"
    )
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run([sys.executable, "-c", code, words], env=env, capture_output=True, check=True)


def test_the_module_does_what_the_program_does() -> None:
    command = [sys.executable, "-m", "cp_plugin.tools", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"cp-plugin {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_of_usage_look_like_all_others(command: str) -> None:
    """Unknown options, missing values and wrong values: one line that names the option, and exit status 2."""
    params = COMMANDS[command].params
    required = [word for p in params if p.required for word in ([p.opts[0], "1"] if p.opts[0][0] == "-" else ["x"])]
    cases = [([*required, "--rankss", "3"], "No such option: --rankss")]
    valued = [p for p in params if p.param_type_name == "option" and not p.is_flag]
    cases += [([*required, p.opts[0]], f"Option '{p.opts[0]}' requires an argument.") for p in valued[:2]]
    refused = [p for p in valued if issubclass(kind(p), (int, float, StrEnum))]
    cases += [([*required, p.opts[0], "x!"], f"{p.opts[0]} x!: ") for p in refused]
    for first in [p for p in params if p.required][:1]:
        option = first.opts[0][0] == "-"
        cases.append(([], f"Missing option '{first.opts[0]}'." if option else f"Missing argument '{first.name}'."))
    for words, message in cases:
        done = cp_plugin(command, *words)
        assert (done.exit_code, done.stdout) == (2, ""), (words, done.output)
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, (words, done.stderr)
        assert not set(done.stderr) & set("╭│`"), (words, done.stderr)


def test_an_unknown_command() -> None:
    done = cp_plugin("verfy")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: No such command 'verfy'. Did you mean 'verify'?")


def test_a_hint_helps() -> None:
    """One slip of the finger is found; a word that only shares letters is not."""
    known = [*providers.registry(), *backends.names(), "selective", "none", "causal", "llama3-8b", "dgx-h100"]
    for name in known:
        slips = [name[:-1], name[1:], name + name[-1], name[:1] + name[2:], name[:-2] + name[-1] + name[-2]]
        for slip in (s for s in slips if len(s) > 3 and s != name):
            assert re.search(rf"(: did you mean|or) .*\b{re.escape(name)}\b", did_you_mean(slip, known)), (slip, name)
    for word, listed in (
        ("some", ("none", "selective", "full")),
        ("fast", ("sdpa", "te", "triton")),
        ("nofile", ("chat", "code", "long")),
        ("float8", ("float64", "float32", "bfloat16", "float16")),  # most of what the message lists anyway
        ("x", known),
    ):
        assert did_you_mean(word, listed) == "", word
    for name in known:
        for same in {name.upper(), name.replace("_", "-"), name.replace("-", "_")} - {name}:
            assert did_you_mean(same, known) == f": did you mean {name}?", "not those that contain it, too"


def test_flags_after_two_dashes_are_named_as_written() -> None:
    """They are Megatron's, which the command's own are not."""
    flags = ["--cp-provider", "rnig", "--context-parallel-size", "2"]
    done = run_forked(partial(PROGRAM.main, ["plan", "--cluster", "dgx-h100", "--", *flags]))
    assert done.returncode == 2 and "--cp-provider rnig: did you mean ring?" in done.stderr
