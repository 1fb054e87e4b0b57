"""The low-rank gate of GLA (arXiv 2312.06635, section 4.4), computed from the hidden state.

    hidden [s, b, hidden] --down--> [s, b, 16] --up, bias--> gate [s, b, g, d]

``down`` is replicated over tensor-parallel ranks; ``up`` and the bias are sharded by heads. Core attention does not get
the hidden state: ``replace_get_query_key_value`` appends the gate to the values, so it survives any recomputation.
"""

from __future__ import annotations

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

from cp_plugin.linear.features import initial
from cp_plugin.linear.variants import GATE_RANK, Heads
from cp_plugin.megatron.patches.patching import Call, wraps


class Gate(nn.Module):
    """The gate of one layer. Initial weights depend only on the layer's and the head's number."""

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
    called_by="SelfAttention",
    otherwise="gated linear attention would train without its gate",
    when=lambda run: run.settings.linear is not None and run.settings.linear.kind.gated,
)
def replace_get_query_key_value(call: Call) -> Any:
    """Append the layer's gate, if it has one, to the values of ``SelfAttention.get_query_key_value_tensors``."""
    found, layer = call.original(), call["self"]
    gate = getattr(layer.core_attention, "gate", None)
    if not isinstance(gate, Gate):
        return found
    query, key, value, *rest = found
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
