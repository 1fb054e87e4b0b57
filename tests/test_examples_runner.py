"""The command that shows and prints the examples."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cp_plugin.cli.app import app
from cp_plugin.cli.examples import config
from cp_plugin.cli.examples.config import load, words


def invoke(*given: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["example", *given])
    return found.exit_code, found.output


def test_the_list_and_one_of_it() -> None:
    status, text = invoke()
    assert status == 0 and all(name in text for name in config.names())
    for name in config.names():
        status, text = invoke(name)
        example = load(name)
        assert status == 0 and example.config.title in text and all(v in text for v in example.variants)
        assert f"Next: cp-plugin example {name}" in text and "--print sh" in text
        status, text = invoke(name, "--print", "flags")
        assert status == 0 and text.split() == [w for line in words(example.experiment().with_length()) for w in line]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--print", "sh"], "NAME is missing"),
        (["lasp2-64xa100", "--variant", "gla"], "--variant gla has no effect alone: add --print sh"),
        (["lasp3-64xa100"], "did you mean lasp2-64xa100"),
        (["lasp2-64xa100", "--print", "flags", "--seq-length", "3000"], "nearest: 2048"),
        (["lasp2-64xa100", "--print", "flags", "--variant", "gal"], "--variant gal: did you mean gla"),
        (["lasp2-64xa100", "--print", "flags", "--json"], "--json has no effect with --print flags"),
        (["lasp2-64xa100", "--list"], "leave the other arguments out"),
    ],
)
def test_refusals_of_the_command(given: list[str], message: str) -> None:
    status, text = invoke(*given)
    assert status == 2 and message in text.replace("\n", " ")
