"""An example, a variant, a length and the user's changes -> Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from cp_plugin.cli.examples.config import Example, Experiment, Value, changed, size
from cp_plugin.cli.examples.shapes import resized
from cp_plugin.cli.flags import check_name
from cp_plugin.core.options import Options
from cp_plugin.core.text import in_words
from cp_plugin.methods import registry as providers

UPSTREAM = "upstream"
AXES = ("tensor-model-parallel-size", "pipeline-model-parallel-size")
CONTEXT = "context-parallel-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the user changes beyond choosing a variant."""

    provider: str | None = None
    options: Options = field(default_factory=Options)
    nodes: int | None = None
    per_node: int | None = None
    more: Sequence[str] = ()
    """Megatron flags, as typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The training of an example, complete except for data and checkpoints."""

    experiment: Experiment
    nodes: int
    per_node: int
    values: Mapping[str, Value]
    """Of the flags."""
    notes: tuple[str, ...] = ()
    """What another number of GPUs changes, one line each."""

    @property
    def devices(self) -> int:
        """GPUs."""
        return self.nodes * self.per_node

    @property
    def flags(self) -> list[str]:
        """Megatron's, without those for data and checkpoints, which only the machine knows."""
        return [word for line in self.lines for word in line]

    @property
    def lines(self) -> list[list[str]]:
        """The words of each flag."""
        return [found for pair in self.values.items() if (found := words(*pair))]

    def value(self, flag: str, default: Value = None) -> Value:
        """The value of a flag; the default where it is not given."""
        return self.values.get(flag, default)

    def size(self, flag: str) -> int:
        """The whole number of a flag; 1 where it is not given."""
        return size(flag, self.value(flag, 1))

    @property
    def seq_length(self) -> int:
        """Tokens of a sequence."""
        return self.size("seq-length")

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks."""
        return self.devices // (self.size(CONTEXT) * self.size(AXES[0]) * self.size(AXES[1]))


def command(
    example: Example, variant: str | None = None, seq_length: int | None = None, changes: Changes | None = None
) -> Command:
    """The command of a training.

    Raises:
        ValueError: for a variant or a length that the example does not have, an unknown provider, options that do not
            fit it, and an unusable number of GPUs; the message has the fix.
    """
    changes = changes or Changes()
    experiment = example.experiment(variant)
    chosen, more = _flags_of(changes.options), parsed(changes.more)
    values = _with_method(experiment.flags, changes.provider, chosen)
    values["seq-length"] = size("seq-length", more.pop("seq-length", None) or _length(experiment, seq_length))
    values.setdefault("max-position-embeddings", values["seq-length"])
    asked = Command(
        experiment=experiment,
        nodes=changes.nodes or experiment.cluster.nodes,
        per_node=changes.per_node or experiment.cluster.per_node,
        values=changed(values, more),
    )
    return _divided(asked, given={*chosen, *more})


def _flags_of(options: Options) -> dict[str, Value]:
    """The options that the user gave, as flags."""
    chosen = {name.replace("_", "-"): in_words(value) for name, value in options.chosen.items()}
    if options.layout is not None:
        chosen["layout"] = options.layout
    if options.backend != "auto":
        chosen["backend"] = options.backend
    return {f"cp-{name}": int(value) if value.isdecimal() else value for name, value in chosen.items()}


def parsed(more: Sequence[str]) -> dict[str, Value]:
    """Typed flags by name; the words up to the next flag are the value.

    Raises:
        ValueError: for words in front of the first flag.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in more:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = [value] if equals else []
        elif not name:
            raise ValueError(f"{word}: only flags of Megatron may follow --, such as --train-iters 100")
        else:
            found[name].append(word)
    return {flag: _value(words) for flag, words in found.items()}


def saving(command: Command) -> list[str]:
    """Flags for how often and in which format to save, by how the optimizer is sharded; none that the example sets."""
    given = [] if command.value("save-interval") else ["--save-interval", "100"]
    if command.value("ckpt-format"):
        return given
    sharded = "fsdp_dtensor" if command.value("use-megatron-fsdp") else "torch_dist"
    return [*given, "--ckpt-format", sharded]


def words(flag: str, value: Value) -> list[str]:
    """A flag as command-line words; no words for one that is taken away."""
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
    """The flags with another method, or other options of the same."""
    found = dict(flags) if provider is None else _with_provider(flags, provider)
    of_softmax = [flag.removeprefix("cp-") for flag in chosen if flag not in ("cp-layout", "cp-backend")]
    if of_softmax and _all_linear(found):
        raise ValueError(f"--{of_softmax[0]} does nothing: all layers have linear attention; leave it out")
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
            f"--provider {provider}: the layers have linear attention; use {', '.join(providers.names('linear'))}"
        )
    options = {option.flag.removeprefix("--") for option in providers.registry().options.values()}
    found = {flag: value for flag, value in flags.items() if flag not in options}
    found["cp-provider"] = provider
    return found


def _divided(asked: Command, given: Set[str]) -> Command:
    """The command with the published number of data-parallel ranks, and context parallelism over the remaining GPUs.

    given: flags that the user gave, which stay. With the number of context-parallel ranks among them, the number of
        data-parallel ranks follows from it.
    """
    fixed = CONTEXT in given
    ours, tensor, pipeline = asked.size(CONTEXT), asked.size(AXES[0]), asked.size(AXES[1])
    data = 1 if fixed else max(1, asked.experiment.devices // (ours * tensor * pipeline))
    ranks, rest = divmod(asked.devices, tensor * pipeline * (ours if fixed else data))
    if rest or ranks < 1:
        need = tensor * pipeline * (ours if fixed else data)
        sizes = " x ".join(
            f"--{flag} {n}" for flag, n in ((AXES[0], tensor), (AXES[1], pipeline), (CONTEXT, ours)) if n > 1
        )
        raise ValueError(
            f"{_shown(asked)}: {asked.devices} GPUs are not a multiple of {need} ({sizes or 'data-parallel'})"
        )
    if fixed:
        return asked
    own = asked.experiment.cluster
    node = (max(1, own.per_node // tensor), max(1, asked.per_node // tensor))
    values = resized(dict(asked.values), ranks, node, given)
    other = [f"--{flag} {old} -> {values[flag]}" for flag, old in asked.values.items() if values[flag] != old]
    notes = (f"{_shown(asked)} instead of {own.nodes} x {own.per_node}: {', '.join(other)}",) if other else ()
    return replace(asked, values=values, notes=notes)


def _shown(asked: Command) -> str:
    return f"{asked.nodes} node{'s' * (asked.nodes > 1)} x {asked.per_node} GPU{'s' * (asked.per_node > 1)}"
