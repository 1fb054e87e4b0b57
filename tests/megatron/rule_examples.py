"""What the examples of rules have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.rule import Rule

RING = Settings(provider="ring", options=Options(layout="contiguous"))


@dataclass(frozen=True, kw_only=True)
class Example:
    """What brings a rule about."""

    names: str
    """Flag and value, as they stand in the message."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the run, or fields of the layer or the call, that are not those of the base."""
    settings: Settings = RING
    version: str = "0.19.0"
    device: str = "cpu"


def example(names: str, **args: Any) -> Example:
    return Example(names=names, args=args)


def check(rule: Rule, said: str | None, names: str) -> None:
    """That the message names the flag, its value, and what to do."""
    assert said is not None, f"the example does not bring about {rule.name!r}"
    assert names in said or re.search(names, said), said
    assert "{" not in said.replace("{}", ""), said
    if rule.kind == "refuse":
        assert rule.fix, "it does not say what to do"
        assert re.search(re.sub(r"\\?{\w+\\?}", ".*", re.escape(rule.fix)), said), said
