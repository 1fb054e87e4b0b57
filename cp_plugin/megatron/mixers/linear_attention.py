"""Core attention of linear layers: a variant of ``engine.linear`` between Megatron's q, k, v and output.

Megatron applies RoPE to q and k of these layers too. A gated variant gets the gate appended to the values (``Gate``):
v ``[s/cp, b, g, d]`` becomes ``[s/cp, b, g, 2 * d]``.

Weights belong to heads, and tensor parallelism shards them by heads. In distributed checkpoints their names carry the
layer's number, since not all layers of a hybrid model have them.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm

from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear.features import initial
from cp_plugin.engine.linear.variants import GATE_RANK, Heads, LinearAttention
from cp_plugin.megatron import runtime
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.rules import layers as rules


class Gate(nn.Module):
    """The low-rank gate of one layer of GLA (arXiv 2312.06635, section 4.4), computed from the hidden state.

        hidden [s, b, hidden] --down--> [s, b, 16] --up, bias--> gate [s, b, g, d]

    ``down`` is replicated over tensor-parallel ranks; ``up`` and the bias are sharded by heads. Initial weights depend
    only on the layer's and the head's number. Core attention does not get the hidden state:
    ``replace_get_query_key_value`` appends the gate to the values, so it survives any recomputation.
    """

    def __init__(self, config: TransformerConfig, heads: Heads, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel and tp_group.size() > 1
        self._tp_group = tp_group
        numbers = range(heads.first_kv_head, heads.first_kv_head + heads.kv_heads)
        down = initial((GATE_RANK, config.hidden_size), config.hidden_size, heads.layer)
        up = torch.stack([initial((heads.head_dim, GATE_RANK), GATE_RANK, heads.layer, head + 1) for head in numbers])
        self.down = nn.Parameter(down.to(config.params_dtype))
        self.up = nn.Parameter(up.to(config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(heads.kv_heads, heads.head_dim, dtype=config.params_dtype))
        self.down.sequence_parallel = self._sequence_parallel  # Megatron sums its gradients over these ranks
        for weight in (self.up, self.bias):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[s/cp, b, hidden]`` (with sequence parallelism ``[s/cp/tp, ...]``) -> ``[s/cp, b, g, d]``."""
        low = linear(hidden_states.to(self.down.dtype), self.down)
        if self._sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self._tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self._tp_group)
        return torch.einsum("sbr,gdr->sbgd", low, self.up) + self.bias


@wraps(
    "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
    "gate of gated linear attention",
    "hidden_states",
    otherwise="gated linear attention would train without its gate",
    when=lambda run: run.settings.linear is not None and run.settings.linear.kind.gated,
)
def replace_get_query_key_value(call: Call) -> Any:
    """Append the layer's gate, if it has one, to the values of ``SelfAttention.get_query_key_value_tensors``."""
    tensors, layer = call.original(), call["self"]
    gate = getattr(layer.core_attention, "gate", None)
    if not isinstance(gate, Gate):
        return tensors
    query, key, value, *rest = tensors
    gates = gate(_normalised(call["hidden_states"], layer.linear_qkv))
    return query, key, torch.cat((value, gates), 3), *rest


def _normalised(hidden_states: Tensor, linear_qkv: Any) -> Tensor:
    """The input of the q, k, v projection; Transformer Engine's module applies the layer's norm inside."""
    weight = getattr(linear_qkv, "layer_norm_weight", None)
    if weight is None:
        return hidden_states
    x, weight = hidden_states.float(), weight.float() + linear_qkv.zero_centered_gamma
    if linear_qkv.normalization == "RMSNorm":
        return rms_norm(x, weight.shape, weight, linear_qkv.eps).to(hidden_states.dtype)
    bias = linear_qkv.layer_norm_bias.float()
    return layer_norm(x, weight.shape, weight, bias, linear_qkv.eps).to(hidden_states.dtype)


class LinearCoreAttention(AnyCoreAttention):
    """Linear attention over the whole sequence by the chosen provider."""

    kind = "linear"

    def __init__(self, config: TransformerConfig, layer_number: int, *positional: Any, **named: Any) -> None:
        super().__init__(config, layer_number, *positional, **named)
        linear = runtime.settings().linear
        assert linear is not None, "a linear layer of a model without linear attention"
        layer = rules.Layer(args=config, settings=runtime.settings(), scale=self.softmax_scale)
        rules.check_layer(rules.LINEAR_LAYER, layer)
        heads = _heads(config, layer_number, self.tp_group.size(), self.tp_group.rank())
        self.linear = LinearAttention(linear.kind, heads).to(config.params_dtype)
        for weight in self.linear.parameters():
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
        self.gate = Gate(config, heads, self.tp_group) if linear.kind.gated else None

    def attend(self, batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        if not causal:
            raise ValueError(f"layer {self.layer_number}: linear attention is causal, but got the mask type no_mask")
        gate = None
        if self.gate is not None:
            if value.size(3) != 2 * self.linear.heads.v_head_dim:
                raise ValueError(
                    f"layer {self.layer_number}: {runtime.settings().flag} got no gate, which is computed in "
                    "get_query_key_value_tensors of Megatron's SelfAttention, which the --spec must use for this layer"
                )
            value, gate = value.chunk(2, 3)
        attend = partial(batch.cp.linear_attention, cu_seqlens=batch.bounds)
        return self.linear(query, key, value, gate, attend)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weights for distributed checkpoints, without ``sharded_offsets``, which would stack all layers."""
        tensors = super().sharded_state_dict(prefix, (), metadata)
        for tensor in tensors.values():
            tensor.key = f"{prefix}of_layer_{self.layer_number}.{tensor.key.removeprefix(prefix)}"
        return tensors


def _heads(config: TransformerConfig, layer_number: int, tp: int, tp_rank: int) -> Heads:
    assert config.num_query_groups is not None
    groups = config.num_query_groups // tp
    return Heads(
        heads=config.num_attention_heads // tp,
        kv_heads=groups,
        head_dim=config.kv_channels,
        v_head_dim=config.kv_channels,
        first_kv_head=tp_rank * groups,
        all_kv_heads=config.num_query_groups,
        layer=layer_number - 1,
        layers=config.num_layers,
    )


_FORWARD_AND_BACKWARD = 3


@wraps(
    "megatron.training.training:num_floating_point_operations",
    "floating point operations of linear layers",
    "args batch_size",
    otherwise="the logged throughput would be that of quadratic attention",
    when=lambda run: run.settings.linear is not None,
)
def replace_num_floating_point_operations(call: Call) -> float:
    """Replaces ``num_floating_point_operations``, which counts linear layers as quadratic attention."""
    linear = runtime.settings().linear
    assert linear is not None, "installed with linear attention only"
    args, batch = call["args"], call["batch_size"]
    tokens, squares = map(call.arguments.get, ("total_real_tokens_in_batch", "seqlen_squared_sum_in_batch"))
    tokens = batch * args.seq_length if tokens is None else tokens
    squares = batch * args.seq_length**2 if squares is None else squares
    softmax = 2 * args.num_attention_heads * args.kv_channels * squares  # two products, half of them masked
    layers = sum(map(linear.has, range(1, args.num_layers + 1)))
    return call.original() + _FORWARD_AND_BACKWARD * layers * (tokens * count_operations(args, linear) - softmax)


def count_operations(args: argparse.Namespace, linear: Linear) -> int:
    """Operations of one layer's forward, over all tensor-parallel ranks.

    For keys of d features and values of e: 2 d e per key/value head (k v^T into the state), 2 d e per query head (the
    state read), and the learned projections.
    """
    heads, size = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads
    call = linear.problem(Problem(size=1, heads=heads, kv_heads=groups, head_dim=size))
    own = linear.kind.learned(heads, groups, size, size, args.hidden_size)
    return 2 * ((heads + groups) * call.head_dim * call.v_head_dim + own.matrices + own.replicated)


MIXER = Mixer(
    name="linear attention",
    kind="linear",
    computes=lambda module: isinstance(module, LinearCoreAttention),
    patches=(replace_get_query_key_value, replace_num_floating_point_operations),
)
