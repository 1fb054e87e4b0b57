"""Examples of rules, shared by the tests of refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.rule import Rule

RING = Settings(provider="ring", options=Options(layout="contiguous"))


@dataclass(frozen=True, kw_only=True)
class Example:
    """A subject that a rule refuses."""

    names: str
    """Flag and value, as the message names them."""
    args: Mapping[str, Any]
    """Arguments of the run, or fields of the layer or the call, that differ from the base."""
    settings: Settings
    version: str
    device: str | None


def example(
    names: str, *, settings: Settings = RING, version: str = "0.19.0", device: str | None = "cpu", **args: Any
) -> Example:
    return Example(names=names, args=args, settings=settings, version=version, device=device)


def check(rule: Rule, said: str | None, names: str) -> None:
    """The message names the flag, its value and the fix."""
    assert said is not None, f"{rule.name!r} does not apply to its example"
    assert names in said or re.search(names, said), said
    assert "{" not in said.replace("{}", ""), said
    if rule.kind == "refuse":
        assert rule.fix, "it does not say what to do"
        assert re.search(re.sub(r"\\?{\w+\\?}", ".*", re.escape(rule.fix)), said), said
