"""One entry of the table of rules: what is refused, adjusted or warned about, why, and what to do instead.

    flag("--qk-clip", why="the kernels do not report the scores")
    Rule(name="first and last layers", what="--first-last-layers-bf16 with --cp-fp8 compute", why=..., looks_at=...)

The rules of a subject are evaluated in one pass, in the order of their table: one error has all that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Found = Mapping[str, object] | None
"""What a message is filled in with; None: the rule does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is not supported, or not as it was asked for.

    Its message is ``what: why; fix``, with the values that ``looks_at`` found in the place of ``{names}``.
    """

    name: str
    """By which tests and documentation know it; no two rules have the same."""
    what: str
    """The flag and its value, or another thing that is asked for."""
    looks_at: Callable[[Any], Found]
    """Of the subject: a training run, a layer, a call of it, a configuration."""
    why: str = ""
    fix: str = ""
    kind: Literal["refuse", "adjust", "warn"] = "refuse"
    sentence: bool = False
    """``what`` is a sentence of its own; otherwise it completes "--cp-provider ring does not support"."""
    late: bool = False
    """It needs what Megatron's own validation fills in."""
    sets: Mapping[str, object] = field(default_factory=dict)
    """What an adjusting rule sets: attribute -> value."""

    @property
    def text(self) -> str:
        """The message before anything is filled in."""
        because = "; ".join(part for part in (self.why, self.fix) if part)
        return f"{self.what}: {because}" if because else self.what

    def message(self, **values: object) -> str:
        """The message with these values."""
        return self.text.format(**values)

    def of(self, subject: Any) -> str | None:
        """The message for a subject; None: the rule does not apply."""
        found = self.looks_at(subject)
        return None if found is None else self.message(**found)


def when(applies: object, **values: object) -> Found:
    """The values, where a rule applies."""
    return values if applies else None


def given(name: str) -> Callable[[Any], Found]:
    """Applies where an attribute of the subject is set; the message has its value under the attribute's name."""

    def looks_at(subject: Any) -> Found:
        value = getattr(subject, name)
        return when(value, **{name: value})

    return looks_at


def flag(
    name: str, *, why: str, fix: str = "leave it out", refused: Callable[[Any], Any] = bool, linear: bool = False
) -> Rule:
    """A flag of Megatron's, and the values it must not have. A version without the flag cannot have it switched on.

    Args:
        name: the flag, with its dashes. The subject's ``args`` have its value: a namespace, or a layer's configuration.
        linear: refused with linear attention only, of which there is a rule beside one for all models.
    """
    attribute = name.removeprefix("--").replace("-", "_")

    def looks_at(subject: Any) -> Found:
        value = getattr(subject.args, attribute, None)
        return when(value is not None and refused(value), value=shown(value))

    return Rule(name=f"linear {name}" if linear else name, what=f"{name}{{value}}", why=why, fix=fix, looks_at=looks_at)


def shown(value: Any) -> str:
    """A flag's value as it stands behind the flag; nothing for a switch."""
    return "" if value is True else f" {getattr(value, 'name', value)}"


def refuse(rules: Iterable[Rule], subject: Any, *, prefix: str = "", suffix: str = "") -> None:
    """Look at all rules that refuse.

    Args:
        prefix, suffix: around what is refused by rules whose message is not a sentence.

    Raises:
        ValueError: for everything that is refused, in one message.
    """
    found = [(rule, said) for rule in rules if rule.kind == "refuse" and (said := rule.of(subject)) is not None]
    if found:
        parts = " | ".join(said for rule, said in found if not rule.sentence)
        sentences = [said for rule, said in found if rule.sentence]
        raise ValueError(" | ".join([f"{prefix}{parts}{suffix}", *sentences] if parts else sentences))


def adjust(rules: Iterable[Rule], subject: Any, kind: Literal["adjust", "warn"] = "adjust") -> list[str]:
    """Set in the subject's ``args`` what the rules of this kind set (warnings set nothing); their messages."""
    told = []
    for rule in rules:
        said = rule.of(subject) if rule.kind == kind else None
        if said is not None:
            vars(subject.args).update(rule.sets)  # before the next one looks
            told.append(said)
    return told
