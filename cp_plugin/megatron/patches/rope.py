"""RoPE slicing: rotary embeddings of the whole sequence, cut to the positions this rank holds.

Replaces ``get_pos_emb_on_this_cp_rank``, which the rotary embeddings of models and of MLA layers import by value.
``RotaryEmbedding`` and ``YarnRotaryEmbedding`` cache what they return, so their caches are emptied when the layout may
have changed. ``MultimodalRotaryEmbedding`` makes its angles from position ids, and needs those of the whole sequence.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around


@around
def replace_get_pos_emb(call: Call) -> Tensor:
    """The replacement for ``get_pos_emb_on_this_cp_rank``: any layout, any device, differentiable."""
    if call["cp_group"] is None:
        raise ValueError("cp_group must be provided to get positional embedding per CP rank")
    return runtime.context_parallel(call["cp_group"]).shard(call["pos_emb"], call["seq_dim"])


@around
def replace_set_cos_sin_cache(call: Call) -> None:
    """The replacement for ``YarnRotaryEmbedding._set_cos_sin_cache``: no table is made.

    The fused rotation of MLA alone reads it, and the plugin switches that off: the table is cut as that of a sequence
    of ``original_max_position_embeddings`` tokens, in which the angles of a shorter sequence are in other places. A
    layout need not be able to divide that length either.
    """


def forget_cached_embeddings() -> None:
    """Empty the caches of all rotary embeddings."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
