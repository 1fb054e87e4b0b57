"""An example, a variant, a length and the user's changes -> Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cp_plugin.cli.examples.config import Example, Experiment, Value, changed, size
from cp_plugin.cli.flags import check_name
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers

UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The user's changes beyond the choice of a variant."""

    provider: str | None = None
    options: Options = field(default_factory=Options)
    more: Sequence[str] = ()
    """Megatron flags, as typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The training of an example, without flags for data and checkpoints, which depend on the machine."""

    experiment: Experiment
    values: Mapping[str, Value]
    """Flag -> value."""

    @property
    def flags(self) -> list[str]:
        return [word for line in self.lines for word in line]

    @property
    def lines(self) -> list[list[str]]:
        """The command-line words of each flag."""
        return [found for pair in self.values.items() if (found := words(*pair))]

    def value(self, flag: str, default: Value = None) -> Value:
        return self.values.get(flag, default)

    def size(self, flag: str) -> int:
        """The value of a flag as a whole number; 1 by default."""
        return size(flag, self.value(flag, 1))

    @property
    def seq_length(self) -> int:
        return self.size("seq-length")


def command(
    example: Example, variant: str | None = None, seq_length: int | None = None, changes: Changes | None = None
) -> Command:
    """The command of a training.

    Raises:
        ValueError: for an unknown variant, length or provider, and options without effect; the message has the fix.
    """
    changes = changes or Changes()
    experiment = example.experiment(variant)
    more = parsed(changes.more)
    values = _with_method(experiment.flags, changes.provider, _flags_of(changes.options))
    values["seq-length"] = size("seq-length", more.pop("seq-length", None) or _length(experiment, seq_length))
    values.setdefault("max-position-embeddings", values["seq-length"])
    return Command(experiment=experiment, values=changed(values, more))


def _flags_of(options: Options) -> dict[str, Value]:
    """The given options as flags."""
    chosen = {option.flag.removeprefix("--"): in_words(value) for option, value in providers.in_order(options).items()}
    return {flag: int(value) if value.isdecimal() else value for flag, value in chosen.items()}


def parsed(more: Sequence[str]) -> dict[str, Value]:
    """Typed flags by name, with the words up to the next flag as value; ValueError for words before the first flag."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in more:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = [value] if equals else []
        elif not name:
            raise ValueError(f"{word}: only Megatron's flags may follow --, such as --train-iters 100")
        else:
            found[name].append(word)
    return {flag: _value(words) for flag, words in found.items()}


def saving(command: Command) -> list[str]:
    """Flags for the interval and format of checkpoints, unless the example sets them."""
    given = [] if command.value("save-interval") else ["--save-interval", "100"]
    if command.value("ckpt-format"):
        return given
    sharded = "fsdp_dtensor" if command.value("use-megatron-fsdp") else "torch_dist"
    return [*given, "--ckpt-format", sharded]


def words(flag: str, value: Value) -> list[str]:
    """A flag as command-line words; none for a removed flag."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{flag}"]
    return [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]


def _value(words: list[str]) -> Value:
    values: list[str | int | float] = [int(word) if word.isdecimal() else word for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _length(experiment: Experiment, asked: int | None) -> int:
    if asked is None:
        return experiment.lengths[0]
    if asked not in experiment.lengths:
        near = min(experiment.lengths, key=lambda n: abs(n - asked))
        raise ValueError(
            f"--seq-length {asked}: {experiment.name} ({experiment.variant}) has "
            f"{', '.join(map(str, sorted(experiment.lengths)))} (nearest: {near}); pass any other after --, as "
            f"-- --seq-length {asked}"
        )
    return asked


def _with_method(flags: Mapping[str, Value], provider: str | None, chosen: Mapping[str, Value]) -> dict[str, Value]:
    """The flags with another method, or other options of the same method."""
    found = dict(flags) if provider is None else _with_provider(flags, provider)
    of_softmax = [flag.removeprefix("cp-") for flag in chosen if flag not in ("cp-layout", "cp-backend")]
    if of_softmax and _all_linear(found):
        raise ValueError(f"--{of_softmax[0]} has no effect: all layers have linear attention; leave it out")
    return {**found, **chosen}


def _all_linear(flags: Mapping[str, Value]) -> bool:
    return bool(flags.get("cp-linear-attention")) and "N" not in str(flags.get("cp-layer-pattern", "L"))


def _with_provider(flags: Mapping[str, Value], provider: str) -> dict[str, Value]:
    linear = flags.get("cp-linear-attention")
    known = [UPSTREAM, *providers.names(), *(providers.names("linear") if linear else [])]
    check_name("--provider", provider, known)
    if provider in providers.names("linear"):
        return {**flags, "cp-linear-provider": provider}
    if _all_linear(flags) or (linear and provider == UPSTREAM):
        raise ValueError(
            f"--provider {provider}: the layers have linear attention; use one of "
            f"{', '.join(providers.names('linear'))}"
        )
    options = {option.flag.removeprefix("--") for option in providers.registry().options.values()}
    found = {flag: value for flag, value in flags.items() if flag not in options}
    found["cp-provider"] = provider
    return found
