"""RoPE slicing: the whole sequence's rotary embeddings, sharded by the layout.

``RotaryEmbedding`` and ``YarnRotaryEmbedding`` cache their results, so their caches are cleared when the layout may
have changed. ``MultimodalRotaryEmbedding`` computes angles from the position ids of the whole sequence.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches.patching import Call, replaces, wraps


@replaces(
    "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
    "layout of RoPE",
    "pos_emb seq_dim cp_group",
    otherwise="tokens would be rotated by other tokens' angles",
)
def replace_get_pos_emb(call: Call) -> Tensor:
    """Replaces ``get_pos_emb_on_this_cp_rank``: any layout, any device, differentiable."""
    if call["cp_group"] is None:
        raise ValueError("cp_group must be provided to get positional embedding per CP rank")
    return runtime.context_parallel(call["cp_group"]).shard(call["pos_emb"], call["seq_dim"])


@wraps(
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache",
    "a table of YaRN angles that belongs to another length",
    otherwise="tokens would be rotated by angles of another length",
)
def replace_set_cos_sin_cache(call: Call) -> None:
    """Replaces ``YarnRotaryEmbedding._set_cos_sin_cache``: makes no table.

    Only MLA's fused rotation reads it, which the plugin switches off. The table is sharded as a sequence of
    ``original_max_position_embeddings`` tokens: wrong for shorter sequences, and not divisible by every layout.
    """


@replaces(
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    "layout of RoPE, packed documents",
    "t cu_seqlens freqs cp_group",
    optional="rotary_interleaved mla_rotary_interleaved multi_latent_attention mscale max_seqlen inverse",
    otherwise="tokens of packed documents would be rotated by other tokens' angles",
)
def replace_apply_rotary_thd(call: Call) -> Tensor:
    """Replaces ``_apply_rotary_pos_emb_thd``: any layout of the pack, documents of any length.

    ``freqs`` cover the whole pack (for images) or the longest document: told apart by ``max_seqlen`` since 0.20, by
    their number before.
    """
    options = dict(call.arguments)
    t, cu_seqlens, freqs, group = (options.pop(name) for name in ("t", "cu_seqlens", "freqs", "cp_group"))
    longest = options.pop("max_seqlen", None)
    if group is None:
        raise ValueError("cp_group must be provided for THD format RoPE")
    cp = runtime.context_parallel(group)
    batch = MicroBatch.find(cp, cu_seqlens, t.size(0) * cp.size)
    places = batch.positions(freqs.device)
    of_the_pack = freqs.size(0) == batch.tokens if longest is None else freqs.size(0) > longest
    if not of_the_pack and batch.documents is not None:
        places = batch.documents.offset_of(places)
    angles = freqs[places.clamp(max=freqs.size(0) - 1)]
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **options).squeeze(1)


def forget_cached_embeddings() -> None:
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
