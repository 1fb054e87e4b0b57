"""Rules of linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_plugin.megatron.rules.rule import Found, Rule, flag, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run

_SHARDED = "sharding linear attention's own weights with FSDP is not tested"
_PATTERN = "its symbols define every layer, and none of them stands for linear attention"


def _layers(run: Run) -> Found:
    linear, layers = run.settings.linear, run.args.num_layers
    assert linear is not None
    length = len(linear.pattern)
    return when(layers % length, pattern=linear.pattern, length=length, layers=layers)


def _heads(run: Run) -> Found:
    linear, args = run.settings.linear, run.args
    assert linear is not None
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    tp = args.tensor_model_parallel_size
    return when(groups % tp, variant=linear.variant, groups=groups, tp=tp)


MLA = flag("--multi-latent-attention", why="its layers compute no gate, and its head sizes are not tested", linear=True)
RULES = (
    flag(
        "--mtp-num-layers",
        example="1",
        why="multi-token prediction (MTP) restarts layer numbers at 1, which would shift the layer pattern",
        linear=True,
    ),
    flag("--hybrid-layer-pattern", example="M*", why=_PATTERN, linear=True),
    flag("--hybrid-override-pattern", example="M*", why=_PATTERN, linear=True),
    MLA,
    flag(
        "--init-model-with-meta-device",
        why="linear attention initializes its weights head by head, not on a meta device",
        linear=True,
    ),
    flag("--use-megatron-fsdp", why=_SHARDED, linear=True),
    flag("--use-torch-fsdp2", why=_SHARDED, linear=True),
    Rule(
        name="linear layers",
        example="--cp-layer-pattern LLL",
        what="--cp-layer-pattern {pattern} has {length} letters, which does not divide --num-layers {layers}",
        why="the pattern is repeated over the layers",
        fix="use a pattern whose length divides the number of layers",
        looks_at=_layers,
        sentence=True,
        late=True,
    ),
    Rule(
        name="linear heads",
        example="--tensor-model-parallel-size 4",
        what="--cp-linear-attention {variant} splits the key/value heads across the tensor-parallel ranks",
        why="{groups} heads (--num-query-groups) is not a multiple of --tensor-model-parallel-size {tp}",
        fix="use a smaller --tensor-model-parallel-size, or a larger --num-query-groups",
        looks_at=_heads,
        sentence=True,
        late=True,
    ),
)
