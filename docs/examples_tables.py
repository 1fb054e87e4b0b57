"""Tables on the pages of the papers' experiments: variants, expectations, baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import markdown_tables as markdown
import published_rows
from evidence.data import Method
from published_rows import Compared

from cp_plugin.attention.setups import settled_or_reason
from cp_plugin.cli.examples.command import Command, words
from cp_plugin.cli.examples.config import BASE, Example, Experiment
from cp_plugin.cli.examples.dry_run import Prediction
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.training.weights import parameters

_OPTIONS = ("layout", "intra_size", "head_parallel", "backward", "head_groups")
"""Fields of a published method that are options of a provider."""


def figure(n: float) -> str:
    """With four digits, or as a whole number."""
    return f"{n:,.0f}" if n >= 1000 else f"{n:.4g}"


def variants(example: Example) -> str:
    """What each variant changes, and its lengths."""
    base = example.experiment(BASE)
    rows = []
    for name in example.variants:
        one = example.experiment(name)
        changed = ", ".join(f"`{flag}`" for flag in _changes(example, name))
        same = name != BASE and one.lengths == base.lengths
        lengths = "the same" if same else ", ".join(f"{n:,}" for n in one.lengths)
        rows.append([f"`{name}`", one.planner_model, f"{one.cluster.nodes} x {one.cluster.per_node}", changed, lengths])
    columns = ("variant", "model", "nodes x GPUs", "other changes", "tokens (the first is the default)")
    return markdown.table(columns, rows)


def expected(found: Mapping[str, tuple[Command, Prediction]]) -> Iterator[str]:
    """The planner's prediction for each variant at its default length."""
    cluster = next(iter(found.values()))[1].cluster
    yield (
        f"Predicted by the planner for each variant at its default length, on the packaged profile `{cluster.name}`: "
        "what this plugin should reach if links and kernels perform as data sheets and papers say. Nothing is fitted. "
        f"A GPU has {in_bytes(cluster.device.memory_bytes)}."
    )
    columns = ("variant", "parameters", "tokens", "memory per GPU", "attention bytes sent per GPU", "iteration")
    rows = [
        [
            f"`{name}`",
            f"{parameters(one.model).total / 1e9:.2f}e9",
            f"{command.seq_length:,}",
            in_bytes(one.priced.footprint.total) + ("" if one.fits else ": **does not fit**"),
            in_bytes(sum(one.sent.values())),
            in_seconds(one.priced.iteration.seconds),
            figure(one.priced.tokens_per_s),
        ]
        for name, (command, one) in found.items()
    ]
    yield markdown.table((*columns, "tokens/s per GPU"), rows)


def by_length(found: Sequence[tuple[Command, Prediction, Prediction | None]]) -> Iterator[str]:
    """The base at each length, and over the ring."""
    columns = ["tokens", "memory per GPU", "iteration", "tokens/s per GPU", "attention of one layer"]
    intro = "The base at each length"
    if found[0][2] is not None:
        columns += ["speedup over the ring: attention", "iteration"]
        intro += ", and its speedup over the ring in the contiguous layout (`--provider ring --layout contiguous`)"
    yield f"{intro}:"
    rows = []
    for command, one, ring in sorted(found, key=lambda each: each[0].seq_length):
        attention, iteration = one.priced.main.seconds, one.priced.iteration.seconds
        cells = [f"{command.seq_length:,}", in_bytes(one.priced.footprint.total), in_seconds(iteration)]
        cells += [figure(one.priced.tokens_per_s), in_seconds(attention)]
        if ring is not None:
            cells.append(f"{ring.priced.main.seconds / attention:.2f}")
            cells.append(f"{ring.priced.iteration.seconds / iteration:.2f}")
        rows.append(cells)
    yield markdown.table(columns, rows)


def baselines(example: Example) -> str:
    """The paper's methods, and the options that turn the example into them."""
    ids = [one for name in example.variants for one in example.experiment(name).published]
    found = published_rows.methods(example.config.paper, ids)
    rows = [[name, _shown(example, compared)] for name, compared in found.items()]
    if "cp-linear-attention" not in example.config.parallel:
        rows.append(["Megatron-LM's own ring, zigzag layout", "`--provider upstream`"])
    return markdown.table(("method", f"options of `cp-plugin example {example.name}`"), rows)


def options(example: Example, method: Method) -> list[str]:
    """Options that turn the example into a method of its paper; none if no provider implements it."""
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
    for field in _OPTIONS:
        value = getattr(method, field)
        if value is not None:
            found += [f"--{field.replace('_', '-')}", str(value)]
    if method.grid == "square":
        side = int(example.config.cluster.devices**0.5)
        found += ["--grid", f"{side}x{side}"]
    if method.attention_recomputed == 1 and example.config.training.get("recompute-granularity"):
        found += ["--", "--cp-recompute-attention"]
    return found


def _shown(example: Example, compared: Compared) -> str:
    method = compared.method
    chosen = options(example, method)
    reason = _refusal(example, method) if chosen else method.missing or method.incomplete
    if reason:
        return f"none: {reason}"
    having = [one for name in example.variants if _is(one := example.experiment(name), chosen)]
    alike = [one for one in having if bool(one.flags.get("use-megatron-fsdp")) == compared.sharded]
    notes = "; ".join(_notes(compared, shared=bool(having and not alike)))
    found = f"`{' '.join(chosen)}`"
    if having:
        variant = (alike or having)[0].variant
        found = "the example itself" if variant == BASE else f"`--variant {variant}`"
    return f"{found} ({notes})" if notes else found


def _refusal(example: Example, method: Method) -> str:
    """Why the method cannot compute the base's attention on its ranks, if so."""
    flags = example.experiment(BASE).flags
    ranks, heads = (int(str(flags[name])) for name in ("context-parallel-size", "num-attention-heads"))
    if not method.provider or method.linear:
        return ""
    problem = Problem(size=ranks, heads=heads, kv_heads=heads)
    return settled_or_reason(providers.get(method.provider), problem, Options()).reason or ""


def _notes(compared: Compared, *, shared: bool) -> Iterator[str]:
    """Differences that no option of ours covers."""
    method = compared.method
    if not method.causal:
        yield "it also computes masked scores"
    if shared and not compared.sharded:
        yield "its GPUs do not shard parameters"
    if method.fused_loss:
        yield "its loss computes logits in pieces"
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
    """A variant's changes to the base's flags, other than the model's, as they are typed."""
    model = set().union(example.config.model, *(one.model for one in example.config.variants.values()))
    before, after = (
        {flag: value for flag, value in example.experiment(name).flags.items() if flag not in model}
        for name in (BASE, variant)
    )
    yield from (" ".join(words(flag, value)) for flag, value in after.items() if before.get(flag) != value)
    yield from (f"no --{flag}" for flag in before if flag not in after)
