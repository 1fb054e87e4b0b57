"""The start-up audit: what the plugin did, printed once by rank 0; refused if an attention layer was left out.

A layer that is not the plugin's (from a ``--spec`` or a model with its own attention class) would attend in Megatron's
layout, or to this rank's tokens only.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, TransformerLayer
from rich import box
from rich.console import Console
from rich.table import Table

from cp_plugin import __version__
from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.kernels import blocks
from cp_plugin.engine.linear import kernels
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.flags import option_flags
from cp_plugin.megatron.mixers import table as mixers
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.patches import patching


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Names of layers, of one rank or of all."""

    replaced: Sequence[str] = ()  # attention layers of the plugin
    linear: Sequence[str] = ()  # the linear ones among these
    states: Sequence[str] = ()
    """Layers that mix tokens without attention, in the layout: Mamba, gated delta net."""
    missed: Sequence[str] = ()
    converted: Sequence[str] = ()  # stacks in which Megatron converts tokens between layers
    backends: Sequence[str] = ()


def run(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather every rank's coverage, refuse or print; collective over all ranks.

    Raises:
        ValueError: on every rank, if any attention layer on any rank is not the plugin's.
    """
    total = union(gather_objects(coverage(chunks, parallel_state.get_pipeline_model_parallel_rank())))
    check(total)
    if dist.get_rank() == 0:
        show(total)


def union(ranks: Sequence[Coverage]) -> Coverage:
    """Return the layers on all ranks."""
    kinds = [kind.name for kind in fields(Coverage)]
    return Coverage(**{kind: sorted({name for one in ranks for name in getattr(one, kind)}) for kind in kinds})


def coverage(chunks: Sequence[torch.nn.Module], stage: int) -> Coverage:
    """Classify the layers of this rank's model chunks."""
    labels: dict[str, list[str]] = defaultdict(list)
    backends = set()
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            label = f"pipeline stage {stage}, chunk {number}: {name}"
            if isinstance(module, AnyCoreAttention):
                labels["replaced"].append(label)
                backends.add(_backend(module, chunk))
                if module.kind == "linear":
                    labels["linear"].append(label)
            elif mixers.keeps_layout(module):
                if isinstance(module, TransformerLayer) or type(module).__name__ == "MambaLayer":
                    labels["states"].append(label)
                if mixers.computed_in(module) is not None:
                    options = runtime.context_parallel(kind="linear").options
                    backends.add(_linear_kernel(options, module.config.params_dtype, chunk))
            elif name.rpartition(".")[2] == "core_attention" or _is_other_attention(module):
                labels["missed"].append(f"{label} ({type(module).__name__})")
            if mixers.converts(module):
                labels["converted"].append(label)
    return Coverage(**labels, backends=sorted(backends))


def check(total: Coverage) -> None:
    """ValueError if an attention layer on any rank is not the plugin's, or if there is none at all."""
    missed, replaced, converted = total.missed, total.replaced, total.converted
    if missed:
        raise ValueError(
            f"{runtime.settings().flag} does not run in every attention layer of this model: "
            f"{len(replaced)} of {len(replaced) + len(missed)}. Not replaced: {'; '.join(missed[:4])}"
            f"{' and more' if len(missed) > 4 else ''}. Take the core attention class from the spec provider's "
            f"core_attention() in the --spec, or {runtime.settings().instead}"
        )
    if converted and not runtime.converted():
        raise ValueError(
            f"the configuration of {'; '.join(converted[:4])} has linear_cp_layout 'contiguous', but the command line "
            f"does not: {runtime.settings().flag} computes in a single layout. Set it with --linear-cp-layout"
        )
    if not replaced:
        raise ValueError(
            f"{runtime.settings().flag} found no attention layer in this model: {runtime.settings().instead}"
        )


def show(total: Coverage) -> None:
    """Print the audit as a table, and warnings again below it."""
    cp, terminal = runtime.context_parallel(), sys.stdout.isatty()
    table = Table("context parallelism", f"cp_plugin {__version__}", box=box.ROUNDED if terminal else box.ASCII)
    table.columns[1].overflow = "fold"  # the name of a function is not cut
    layers = total.replaced
    if runtime.settings().softmax:
        table.add_row("provider", f"{cp.provider.name}: {cp.provider.summary}")
    for number, line in enumerate(runtime.settings().planned):
        table.add_row("" if number else "auto", line)
    if (linear := runtime.settings().linear) is not None:
        by = runtime.context_parallel(kind="linear").provider
        table.add_row("linear attention", f"{linear.variant}: {linear.kind.summary}")
        table.add_row("linear provider", f"{by.name}: {by.summary}")
        table.add_row("layer pattern", f"{linear.pattern} x {len(layers) // len(linear.pattern)}")
    table.add_row("layout", f"{cp.layout.name}; each of {cp.size} ranks holds 1/{cp.size} of every sequence")
    if runtime.converted():
        table.add_row("", "contiguous outside attention: Megatron's layout manager converts")
    if runtime.settings().pad_sequence and (model := runtime.model()) is not None:
        table.add_row("padding", f"{model.padding} masked tokens after every {model.tokens}")
    for flag, value in option_flags.shown(cp.options).items():
        table.add_row(flag, value)
    table.add_row("backend", "\n".join(total.backends))
    for number, reason in enumerate(cp.why):
        table.add_row("" if number else "why", reason)
    parts = "" if linear is None else f": {len(total.linear)} linear, {len(layers) - len(total.linear)} softmax"
    table.add_row("attention layers", f"{len(layers)} of {len(layers)} replaced{parts}")
    if runtime.settings().delta_net is not None:
        by = runtime.context_parallel(kind="linear").provider
        table.add_row("gated delta net", f"by {by.name}: {by.summary}")
    if total.states:
        table.add_row("Mamba and gated delta net", f"{len(total.states)} layers, tokens in the order of the layout")
    if ahead := sum(".mtp." in name for name in layers):
        table.add_row("multi-token prediction", f"{ahead} of these layers; next tokens follow the layout")
    table.add_row("self-check", "once, before training" if runtime.settings().selfcheck else "off")
    names = patching.installed()
    listed = "\n".join(names) if runtime.settings().verbose else f"{len(names)} functions; --cp-verbose lists them"
    table.add_row(f"replaced in megatron-core {compat.megatron_version()}", listed)
    Console(width=None if terminal else 140, soft_wrap=False).print(table)
    for reason in cp.why:
        if reason.startswith("warning:"):
            print(f"cp_plugin: {reason}")
    sys.stdout.flush()


def _is_other_attention(module: torch.nn.Module) -> bool:
    """A layer that mixes tokens without a core attention: linear attention, state space, retrieval."""
    if isinstance(module, TransformerLayer):
        parts = (module.self_attention, module.cross_attention)
        return any(not isinstance(p, IdentityOp | IdentityFuncOp) and not hasattr(p, "core_attention") for p in parts)
    return isinstance(module, BaseTransformerLayer) or type(module).__module__.startswith(compat.STATE_SPACES)


def _backend(module: AnyCoreAttention, chunk: torch.nn.Module) -> str:
    options, dtype = module.context_parallel.options, module.config.params_dtype
    if module.kind == "linear":
        return _linear_kernel(options, dtype, chunk)
    sizes = {"head_dim": module.head_dim, "v_head_dim": module.v_head_dim, "softcap": module.softcap is not None}
    chosen = blocks.choose(options, Problem(size=1, dtype=dtype, **sizes), _device(chunk))
    return f"{chosen.name}: {chosen.why}"


def _linear_kernel(options: Options, dtype: torch.dtype, chunk: torch.nn.Module) -> str:
    """The kernel of linear attention, or of gated delta net, and why."""
    model = runtime.model()
    problem = Problem(size=1, dtype=dtype) if model is None else model.resolved["linear"].problem
    chosen = kernels.choose(options.backend, _device(chunk), problem)
    return f"{chosen.kernel.name}: linear attention, {chosen.why}"


def _device(chunk: torch.nn.Module) -> torch.device:
    return next((p.device for p in chunk.parameters()), torch.device("cpu"))
