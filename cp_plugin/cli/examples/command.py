"""An example, a variant, a length and the user's changes -> Megatron's flags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from cp_plugin.cli.examples.config import Example, Experiment, Value, changed, size
from cp_plugin.cli.flags import check_name
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options, rows_and_columns
from cp_plugin.methods import registry as providers

UPSTREAM = "upstream"
AXES = ("tensor-model-parallel-size", "pipeline-model-parallel-size")
CONTEXT = "context-parallel-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The user's changes beyond the choice of a variant."""

    provider: str | None = None
    options: Options = field(default_factory=Options)
    nodes: int | None = None
    per_node: int | None = None
    more: Sequence[str] = ()
    """Megatron flags, as typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The training of an example, without flags for data and checkpoints, which depend on the machine."""

    experiment: Experiment
    nodes: int
    per_node: int
    values: Mapping[str, Value]
    """Flag -> value."""
    notes: tuple[str, ...] = ()
    """Changes due to another number of GPUs, one line each."""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

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

    @property
    def data_parallel(self) -> int:
        return self.devices // (self.size(CONTEXT) * self.size(AXES[0]) * self.size(AXES[1]))


def command(
    example: Example, variant: str | None = None, seq_length: int | None = None, changes: Changes | None = None
) -> Command:
    """The command of a training.

    Raises:
        ValueError: for an unknown variant, length or provider, options that do not fit it, and an unusable number of
            GPUs; the message has the fix.
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


def _divided(asked: Command, given: Set[str]) -> Command:
    """Keep the published number of data-parallel ranks and give the remaining GPUs to context parallelism.

    Flags in ``given`` stay; if the number of context-parallel ranks is among them, data parallelism follows from it.
    """
    fixed = CONTEXT in given
    ours, tensor, pipeline = asked.size(CONTEXT), asked.size(AXES[0]), asked.size(AXES[1])
    data = 1 if fixed else max(1, asked.experiment.devices // (ours * tensor * pipeline))
    ranks, rest = divmod(asked.devices, tensor * pipeline * (ours if fixed else data))
    if rest or ranks < 1:
        need = tensor * pipeline * (ours if fixed else data)
        given_sizes = ((AXES[0], tensor), (AXES[1], pipeline), (CONTEXT, ours))
        sizes = " x ".join(f"--{flag} {n}" for flag, n in given_sizes if n > 1)
        raise ValueError(
            f"{_shown(asked)}: {asked.devices} GPUs is not a multiple of {need} ({sizes or 'data-parallel'})"
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


_SIZES = ("cp-head-parallel", "cp-intra-size")


def scaled_shape(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The shape of this many ranks with the closest proportions; a size of 1 stays 1.

    Ties go to the shape with the smaller first size: 2x4 for an 8x8 grid on 8 ranks. Sizes above 1 stay above 1 if the
    number of ranks allows it.
    """
    wide = [n for n in sizes if n > 1]
    if not wide:
        return (*sizes[:-1], ranks)
    shrink = (math.log(math.prod(wide)) - math.log(ranks)) / len(wide)

    def distance(shape: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        off = sum((math.log(new) - math.log(old) + shrink) ** 2 for new, old in zip(shape, wide, strict=True))
        return shape.count(1), round(off, 9), shape

    best = iter(min(_factored(ranks, len(wide)), key=distance))
    return tuple(next(best) if n > 1 else 1 for n in sizes)


def resized(
    parallel: dict[str, Value], ranks: int, node: tuple[int, int] | None = None, given: Set[str] = frozenset()
) -> dict[str, Value]:
    """The flags for this many context-parallel ranks, with grids, rings and head axes in proportion.

    Args:
        parallel: flags with ``context-parallel-size``, perhaps ``cp-grid``, ``cp-intra-size`` and ``cp-head-parallel``.
        node: context-parallel ranks of a node, before and now: an inner ring or a head axis that spans a node keeps
            doing so. None: there are no nodes.
        given: flags chosen for these ranks: they stay.

    Raises:
        ValueError: for sizes that are not whole numbers of at least 1.
    """
    old = size("context-parallel-size", parallel["context-parallel-size"])
    found: dict[str, Value] = {**parallel, "context-parallel-size": ranks}
    own = {name: size(name, parallel[name]) for name in _SIZES if parallel.get(name) is not None}
    kept = {name: n for name, n in own.items() if name in given}
    if node:
        kept |= {name: node[1] for name in own.keys() - kept if own[name] == node[0] and ranks % node[1] == 0}
    found.update(kept)
    grid = rows_and_columns(str(parallel.get("cp-grid")))
    if ranks == old or (grid and "cp-grid" in given):
        return found
    heads, intra = own.get("cp-head-parallel", 1), own.get("cp-intra-size")
    rest = grid or (old // heads,)
    if not grid and intra is not None:
        rest = (old // heads // intra, intra)
    if "cp-head-parallel" in kept:
        shape = (kept["cp-head-parallel"], *scaled_shape(rest, max(1, ranks // kept["cp-head-parallel"])))
    else:
        shape = scaled_shape((heads, *rest), ranks)
    if "cp-head-parallel" in own:
        found["cp-head-parallel"] = shape[0]
    if "cp-intra-size" in own and "cp-intra-size" not in kept:
        found["cp-intra-size"] = shape[-1]
    if grid:
        found["cp-grid"] = in_words(shape[1:])
    return found


def _factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All factorisations of a number into this many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *rest) for rest in _factored(number // first, parts - 1))
