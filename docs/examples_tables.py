"""Tables on the pages of the papers' experiments, in Markdown: variants, baselines, what to expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import published_rows
from evidence.data import Method
from published_rows import Compared

from cp_plugin.attention.setups import settled_or_reason
from cp_plugin.cli.examples.command import Command, words
from cp_plugin.cli.examples.config import BASE, Example, Experiment
from cp_plugin.cli.examples.predicted import Prediction
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.text import in_bytes, in_seconds
from cp_plugin.methods import registry as providers
from cp_plugin.planner.training.weights import parameters

_HERE = {"layout": "cp-layout", "intra_size": "cp-intra-size", "head_parallel": "cp-head-parallel"}
_HERE |= {"backward": "cp-backward", "head_groups": "cp-head-groups"}
"""Field of a method -> the flag."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def number(n: float) -> str:
    """A whole number with separators."""
    return f"{n:,.0f}"


def figure(n: float) -> str:
    """With four digits, or as a whole number."""
    return number(n) if n >= 1000 else f"{n:.4g}"


def variants(example: Example) -> str:
    """What each changes, and its lengths."""
    base = example.experiment(BASE)
    rows = []
    for name in example.variants:
        one = example.experiment(name)
        changed = ", ".join(f"`{flag}`" for flag in _changes(example, name))
        same = name != BASE and one.lengths == base.lengths
        lengths = "the same" if same else ", ".join(map(number, one.lengths))
        rows.append([f"`{name}`", one.planner_model, f"{one.cluster.nodes} x {one.cluster.per_node}", changed, lengths])
    columns = ("variant", "model", "nodes x GPUs", "changes beside the model", "tokens (the first is the default)")
    return table(columns, rows)


def expected(found: Mapping[str, tuple[Command, Prediction]]) -> Iterator[str]:
    """What the planner predicts for each variant at its default length."""
    cluster = next(iter(found.values()))[1].cluster
    yield (
        f"The planner's predictions for the default length of each variant on its profile `{cluster.name}` as it is "
        "packaged: what a training by this plugin should take if links and kernels do what their data sheets and "
        f"papers say. Nothing is fitted, unlike below. A GPU has {in_bytes(cluster.device.memory_bytes)}."
    )
    columns = ("variant", "parameters", "tokens", "memory of a GPU", "sent by a GPU for attention", "iteration")
    rows = [
        [
            f"`{name}`",
            f"{parameters(one.model).total / 1e9:.2f}e9",
            number(command.seq_length),
            in_bytes(one.priced.footprint.total) + ("" if one.fits else ": **does not fit**"),
            in_bytes(sum(one.sent.values())),
            in_seconds(one.priced.iteration.seconds),
            figure(one.priced.tokens_per_s),
        ]
        for name, (command, one) in found.items()
    ]
    yield table((*columns, "tokens/s of a GPU"), rows)


def by_length(found: Sequence[tuple[Command, Prediction, Prediction | None]]) -> Iterator[str]:
    """The base at each length, and over the ring."""
    yield "The base at each length" + (
        ", and how many times as fast it is as the ring on contiguous tokens (`--provider ring --layout contiguous`):"
        if found[0][2] is not None
        else ":"
    )
    columns = ["tokens", "memory of a GPU", "iteration", "tokens/s of a GPU", "attention of one layer"]
    ratios = ["over the ring: attention", "iteration"] if found[0][2] is not None else []
    rows = []
    for command, one, ring in sorted(found, key=lambda each: each[0].seq_length):
        seconds = one.priced.iteration.seconds
        cells = [number(command.seq_length), in_bytes(one.priced.footprint.total), in_seconds(seconds)]
        cells += [figure(one.priced.tokens_per_s), in_seconds(one.priced.main.seconds)]
        if ring is not None:
            cells.append(f"{ring.priced.main.seconds / one.priced.main.seconds:.2f}")
            cells.append(f"{ring.priced.iteration.seconds / seconds:.2f}")
        rows.append(cells)
    yield table((*columns, *ratios), rows)


def baselines(example: Example) -> str:
    """The paper's methods, and the options that turn the example into them."""
    ids = [one for name in example.variants for one in example.experiment(name).published]
    found = published_rows.methods(example.config.paper, ids)
    rows = [[name, _shown(example, compared)] for name, compared in found.items()]
    if "cp-linear-attention" not in example.config.parallel:
        rows.append(["Megatron-LM's own ring, on zigzag tokens", "`--provider upstream`"])
    return table(("method", f"options of `cp-plugin example {example.name}`"), rows)


def options(example: Example, method: Method) -> list[str]:
    """What turns the example into a method of its paper; nothing where no provider of ours does."""
    if method.tensor_parallel:
        size = str(example.config.cluster.devices)
        sequence = ["--sequence-parallel"] if method.sequence_parallel else []
        more = ["--context-parallel-size", "1", "--tensor-model-parallel-size", size, *sequence]
        return ["--provider", "upstream", "--", *more]
    if method.provider not in (*providers.names(), *providers.names("linear")):
        return []
    found = ["--provider", method.provider]
    if method.linear:
        return found
    for field, flag in _HERE.items():
        value = getattr(method, field)
        if value is not None:
            found += [f"--{flag.removeprefix('cp-')}", str(value)]
    if method.grid == "square":
        side = int(example.config.cluster.devices**0.5)
        found += ["--grid", f"{side}x{side}"]
    if method.attention_recomputed == 1 and example.config.training.get("recompute-granularity"):
        found += ["--", "--cp-recompute-attention"]
    return found


def _shown(example: Example, compared: Compared) -> str:
    method, _ = compared
    chosen = options(example, method)
    reason = method.missing or method.incomplete if not chosen else _refusal(example, method)
    if reason:
        return f"none: {reason}"
    having = [one for name in example.variants if _is(one := example.experiment(name), chosen)]
    alike = [one for one in having if bool(one.flags.get("use-megatron-fsdp")) == compared.sharded]
    notes = "; ".join(_notes(compared, shared=bool(having and not alike)))
    best = next(iter(alike or having), None)
    words = f"`{' '.join(chosen)}`" if best is None else f"`--variant {best.variant}`"
    words = "the example itself" if best is not None and best.variant == BASE else words
    return f"{words} ({notes})" if notes else words


def _refusal(example: Example, method: Method) -> str:
    """Why the method cannot compute the base's attention on its ranks, if so."""
    flags = example.experiment(BASE).flags
    ranks, heads = (int(str(flags[name])) for name in ("context-parallel-size", "num-attention-heads"))
    if not method.provider or method.linear:
        return ""
    problem = Problem(size=ranks, heads=heads, kv_heads=heads)
    return settled_or_reason(providers.get(method.provider), problem, Options()).reason or ""


def _notes(compared: Compared, *, shared: bool) -> Iterator[str]:
    """What no option of ours does."""
    method = compared.method
    if not method.causal:
        yield "it computes what the mask hides, too"
    if shared and not compared.sharded:
        yield "its GPUs do not share parameters"
    if method.fused_loss:
        yield "its loss makes logits in pieces"
    if 0 < method.attention_recomputed < 1:
        yield "it recomputes attention for half of the sequence, which Megatron cannot"


def _is(experiment: Experiment, chosen: Sequence[str]) -> bool:
    """Whether an experiment has all these options already."""
    has = experiment.flags
    if "--" in chosen:
        return False
    if "cp-linear-attention" in has:
        return list(chosen) == ["--provider", has.get("cp-linear-provider")]
    asked = {f"cp-{flag.removeprefix('--')}": value for flag, value in zip(chosen[::2], chosen[1::2], strict=True)}
    return all(str(has.get(flag)) == value for flag, value in asked.items())


def _changes(example: Example, variant: str) -> Iterator[str]:
    """Flags beside the model's that a variant has and the base has not, as they are typed, or lacks."""
    model = set().union(example.config.model, *(one.model for one in example.config.variants.values()))
    before, after = (
        {flag: value for flag, value in example.experiment(name).flags.items() if flag not in model}
        for name in (BASE, variant)
    )
    yield from (" ".join(words(flag, value)) for flag, value in after.items() if before.get(flag) != value)
    yield from (f"no --{flag}" for flag in before if flag not in after)
