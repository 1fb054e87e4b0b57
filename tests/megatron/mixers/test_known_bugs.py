"""Bugs reported for other context-parallel implementations, by issue number.

Each trained wrongly with a plausible loss, or failed. Most are covered by other tests:

    tokens cut by sequence, documents masked by document   Megatron 6156      test_masks_in_training
    positions of packed documents                          Megatron 5243, 1473, 560, Bridge 1292      test_packed_places
    windows and sinks lost, or unknown to a ring           Accelerate 4177, TE 2541      tests/engine/test_methods
    a token sees a later one, wrong gradients              TE 3248, 1557, Megatron 1464      tests/engine/test_methods
    which mask works with what                             TE 2052      test_cases
    labels shifted inside each rank's part                 verl 4250      tests/engine/attention/test_neighbours
    the loss of multi-token prediction                     Megatron 3959, 7498            test_cases
    a loss as many times too large as there are ranks      Bridge 2055 (three ranks)      test_cases
    a missing process group taken for one of one rank      Bridge 2667      test_groups
    layers without context parallelism                     AutoModel 3507      test_startup
    dropout, lengths, dynamic groups      Megatron 4828, 1669, 5355, 3405, 6821, 6816      test_bad_flags
    resuming with another number of ranks                  Megatron 1232, 1517      test_elastic
    means over the unequal tokens of ranks                 Megatron 7452, 7513      test_contract
    sums and counts of another scale      Megatron 673, Bridge 2055, verl 1332, 6609      test_planted_faults
    no bounds of documents on some pipeline stages         Bridge 2952      test_planted_faults
    packs, their padding, and prediction in them           Megatron 6912, 7238      test_packed_places, test_sft
    padding of documents taken for tokens       TE 3331, 1930      test_packed_places, test_cases, test_sft
    next tokens of packed documents with padding           Megatron 4494      test_mtp_of_dev
    several sequences in a micro-batch                     NeMo 12210 (its tests have two)      test_parity
    layers that mix tokens      transformers 48491, LlamaFactory 10787      huggingface/test_planted_models
    router losses from one rank's tokens                   Megatron 5696, prime-rl 2828      huggingface/test_loss
    a mean of ranks' means in a trainer                  Accelerate 3990, axolotl 3608   huggingface/test_planted_models
    ranks of one sequence with rows of their own           AutoModel 3359      engine/attention/test_agreement
    partial results accumulated in bfloat16                ring-flash-attention 42      engine/kernels/test_merge
    all of Megatron's arguments are accepted              Bridge 48      test_edits (new options of attention)
    gradients as many times too large, or too small        DeepSpeed 5248      huggingface/test_apply says so

Reports about CUDA graphs, NCCL and upstream kernels, which the plugin does not touch, have no test. The others:
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("adapter")


def test_megatron_7452_offsets_count_once_in_the_norm_of_gradients() -> None:
    """Softmax offsets of tensor-parallel ranks were treated as replicas, and clipping was wrong."""
    from test_attention_module import _config

    from cp_plugin.megatron.mixers import core_attention as attention

    offset = attention._softmax_offset(_config(softmax_type="learnable", use_cpu_initialization=True))
    assert isinstance(offset, torch.nn.Parameter) and offset.tensor_model_parallel is True
