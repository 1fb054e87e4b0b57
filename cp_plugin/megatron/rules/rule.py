"""A rule: what is refused, adjusted or warned about, why, and what to do instead.

    flag("--qk-clip", why="the kernels do not report the scores")
    Rule(name="first and last layers", what="--first-last-layers-bf16 with --cp-fp8 compute", why=..., looks_at=...)

All rules for a subject are evaluated in one pass, in table order; one error lists everything that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NAMES: set[str] = set()
"""Of all rules that were made."""
Match = Mapping[str, object] | None  # further values for the message; None: the rule does not apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something unsupported or adjusted; the message is ``what: why; fix``, in which ``{0.name}`` is the subject's."""

    name: str  # unique; used by tests and documentation
    what: str  # the flag and its value, or whatever else was requested
    looks_at: Callable[[Any], object]
    """Examines a subject (a training run, a layer, a call, a configuration). A true value: the rule applies; a mapping
    has further values for the message."""
    why: str = ""
    fix: str = ""
    example: str = ""
    """Flags of a training run that the rule applies to, those that the message names first; ``|`` between several."""
    kind: Literal["refuse", "adjust", "warn"] = "refuse"
    sentence: bool = False
    """``what`` stands alone; otherwise it completes "--cp-provider ring does not support"."""
    late: bool = False  # evaluated after Megatron's own validation
    sets: Mapping[str, object] = field(default_factory=dict)  # attribute -> value that an adjusting rule sets

    def __post_init__(self) -> None:
        NAMES.add(self.name)

    @property
    def examples(self) -> list[str]:
        """The command lines of ``example``."""
        return self.example.split(" | ") if self.example else []

    @property
    def text(self) -> str:
        """The unformatted message."""
        because = "; ".join(part for part in (self.why, self.fix) if part)
        return f"{self.what}: {because}" if because else self.what

    def message(self, subject: Any) -> str | None:
        """The message for a subject; None: the rule does not apply.

        Raises:
            ValueError: for values that the rule cannot look at, such as a division by a flag that is 0.
        """
        try:
            result = self.looks_at(subject)
        except (ArithmeticError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"the flags cannot be checked ({self.name}): {error}") from error
        return self.text.format(subject, **(result if isinstance(result, Mapping) else {})) if result else None


def when(applies: object, **values: object) -> Match:
    """The values if the rule applies."""
    return values if applies else None


def flag(
    name: str,
    *,
    why: str,
    fix: str = "leave it out",
    refused: Callable[[Any], Any] = bool,
    linear: bool = False,
    example: str = "",
) -> Rule:
    """Refuse values of a Megatron flag in ``subject.args``, a namespace or a layer's configuration, if it is there.

    linear: the rule is for linear attention only. example: a value that is refused; none for a switch.
    """

    def looks_at(subject: Any) -> Match:
        value = value_of(subject.args, name)
        return when(value is not None and refused(value), value=shown(value))

    named = {"name": f"linear {name}" if linear else name, "example": f"{name} {example}".strip()}
    return Rule(**named, what=f"{name}{{value}}", why=why, fix=fix, looks_at=looks_at)


def value_of(args: Any, flag: str) -> Any:
    """The parsed value of a flag; None if this version does not have it."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def spelled(args: Any, flags: Iterable[str], wrong: Callable[[Any], Any]) -> str:
    """``--flag value, --flag value`` for the flags whose values are wrong; empty if none is."""
    values = {flag: value_of(args, flag) for flag in flags}
    return ", ".join(f"{flag} {value}" for flag, value in values.items() if value is not None and wrong(value))


def nonzero(value: float | list[float]) -> bool:
    """Return True if a coefficient, or one of several, has an effect."""
    return any(value) if isinstance(value, list) else bool(value)


def shown(value: Any) -> str:
    """A flag's value with a leading space, as it is typed; empty for a switch."""
    if isinstance(value, list | tuple):
        return "".join(shown(one) for one in value)
    return "" if value is True else f" {getattr(value, 'name', value)}"


def refuse(rules: Iterable[Rule], subject: Any, *, prefix: str = "", suffix: str = "") -> None:
    """Raise one ValueError for everything that the rules refuse; prefix and suffix enclose the non-sentences."""
    refused = [(rule, said) for rule in rules if rule.kind == "refuse" and (said := rule.message(subject)) is not None]
    if refused:
        parts = " | ".join(said for rule, said in refused if not rule.sentence)
        sentences = [said for rule, said in refused if rule.sentence]
        raise ValueError(" | ".join([f"{prefix}{parts}{suffix}", *sentences] if parts else sentences))


def adjust(rules: Iterable[Rule], subject: Any, kind: Literal["adjust", "warn"] = "adjust") -> list[str]:
    """Apply the rules of this kind to the subject's ``args`` and return their messages; warnings set nothing."""
    told = []
    for rule in rules:
        said = rule.message(subject) if rule.kind == kind else None
        if said is not None:
            vars(subject.args).update(rule.sets)  # before the next one looks
            told.append(said)
    return told
