"""GPT pretraining for Megatron's training loop: batches, loss, datasets, model.

    train() -> Megatron's pretrain() -> build_datasets, build_model, then per micro-batch forward_step -> loss
                                                                                   |
                                             data iterator -> tensor-parallel broadcast -> slice of this CP rank

Megatron's wheel has the loop but no script; this one works with every supported megatron-core. Plain next-token
pretraining only; `UNSUPPORTED` lists the refused flags of Megatron's own script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import argument_utils, arguments, get_args, get_timers, pretrain
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from cp_plugin.megatron import compat
from cp_plugin.megatron.cpu.mode import use_compiled_helper
from cp_plugin.megatron.rules.rule import value_of
from cp_plugin.megatron.rules.run import packed_by

# b: micro-batch, s: sequence; which entries exist depends on the run
_DTYPES = {
    "tokens": torch.int64,  # b s
    "labels": torch.int64,  # b s
    "loss_mask": torch.float32,  # b s
    "position_ids": torch.int64,  # b s
    "attention_mask": torch.bool,  # b 1 s s
    "cu_seqlens": torch.int32,  # b s+1; this and the next for packed documents only
    "max_seqlen": torch.int32,  # b
}

UNSUPPORTED = (
    "--spec",
    "--yaml-cfg",
    "--sft",
    "--fim-data",
    "--hybrid-context-parallel",
    "--per-dataset-sequences-path",
    "--experimental-attention-variant",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--overlap-moe-expert-parallel-comm",
    "--logits-load-dir",
    "--logits-save-dir",
    "--check-for-spiky-loss",
    "--log-straggler",
    "--record-memory-history",
    "--inprocess-restart",
)


def train() -> None:
    """Pretrain a GPT with the flags in `sys.argv`; ValueError for flags that are not supported here."""
    refuse(arguments.parse_args())
    use_compiled_helper()
    build_datasets.is_distributed = True  # tells Megatron that every rank builds its own
    pretrain(
        train_valid_test_dataset_provider=build_datasets,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        cfg_container=argument_utils.pretrain_cfg_container_from_args(arguments.parse_and_validate_args()),
    )


def refuse(args: argparse.Namespace) -> None:
    """ValueError naming every given flag that this pretraining does not support."""
    refused = [flag for flag in UNSUPPORTED if value_of(args, flag)]
    if args.mtp_num_layers and args.pipeline_model_parallel_layout:
        refused.append("--mtp-num-layers with --pipeline-model-parallel-layout")
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: not supported by cp_plugin.pretrain_gpt, which only pretrains plain GPT models. "
            f"Leave {'it' if len(refused) == 1 else 'them'} out, or run Megatron-LM's own script with `python -m "
            "cp_plugin.run path/to/pretrain_gpt.py ...`"
        )


def get_batch(data_iterator: Iterator[Mapping[str, Tensor]] | None, vp_stage: int | None = None) -> dict[str, Any]:
    """This rank's shard of the next micro-batch: [b, s / cp] per entry, attention_mask [b, 1, s / cp, s] or None.

    Pipeline stages that neither embed tokens nor compute a loss get only the bounds of packed documents.
    """
    args = get_args()
    batch: dict[str, Any] = dict.fromkeys(_DTYPES)
    if not _needs_batch(vp_stage):
        return batch
    shapes = _shapes(args)
    loaded = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    for key, shape in shapes.items():
        if loaded is None:
            batch[key] = torch.empty(shape, dtype=_DTYPES[key], device=torch.cuda.current_device())
        else:
            batch[key] = loaded[key].cuda(non_blocking=True)
        if args.tensor_model_parallel_size > 1:
            source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
            torch.distributed.broadcast(batch[key], source, group=group)
    if "cu_seqlens" in shapes:
        batch = utils.flatten_batch_for_packed_sequences(batch)
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_DTYPES) | {key: batch[key] for key in ("cu_seqlens", "max_seqlen")}
    return _slice(batch)


def _needs_batch(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or bool(packed_by(get_args()))


def _shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    b, s = args.micro_batch_size, args.seq_length
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), (b, s))
    if packed_by(args):
        return shapes | {"cu_seqlens": (b, s + 1), "max_seqlen": (b,)}
    return shapes | ({"attention_mask": (b, 1, s, s)} if args.create_attention_mask_in_dataloader else {})


def _slice(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's shard, by Megatron's function, looked up where it is replaced."""
    return utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's three-part loss of a micro-batch: summed loss, number of tokens, report.

    loss_mask, output: [b, s / cp], each token's weight and cross entropy.
    """
    args = get_args()
    weights = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * weights)
    if args.check_for_nan_in_loss_and_grad:
        for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=total, rejection_func=reject, message=f"{name} in the local loss", tolerance=0.0, fatal=True
            )
    tokens = weights.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data_iterator: Iterator[Any] | None, model: torch.nn.Module) -> tuple[Tensor, partial]:
    """Run one micro-batch through this pipeline stage; returns its output and the loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, utils.get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packed_seq_params(batch),
    )
    return output, partial(loss, batch["loss_mask"])


def _packed_seq_params(batch: Mapping[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    args, bounds, longest = get_args(), batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=args.micro_batch_size * args.seq_length,
        **compat.whole_samples(args),
    )


def build_datasets(samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The training, validation and test datasets, with `samples` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    packed = {"inter_document_masking": True} if packed_by(args) else {}  # since 0.19
    same = {field.name: getattr(args, field.name) for field in fields(GPTDatasetConfig) if hasattr(args, field.name)}
    config = GPTDatasetConfig(
        **same,
        **packed,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    if not args.mock_data and config.blend is None and config.blend_per_split is None:
        raise ValueError("there is no data to train on: add --data-path PREFIX, or --mock-data")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, partial(_builds_data, vp_stage), config).build()


def _builds_data(vp_stage: int | None) -> bool:
    return mpu.get_tensor_model_parallel_rank() == 0 and _needs_batch(vp_stage)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """One pipeline stage of the GPT or hybrid model; called by Megatron."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    same = ("fp16_lm_cross_entropy", "position_embedding_type", "rotary_percent", "rotary_base")
    shared: dict[str, Any] = {name: getattr(args, name) for name in same} | {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "vp_stage": vp_stage,
        "pg_collection": pg_collection,
    }
    if args.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from cp_plugin.megatron.models.hybrid import stack_spec

        pattern = args.hybrid_layer_pattern
        return HybridModel(config=config, hybrid_stack_spec=stack_spec(config), hybrid_layer_pattern=pattern, **shared)
    with_te = args.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_te,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    mtp = None
    if config.mtp_num_layers:  # layers like the stage's last; None on a stage without
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=with_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        **shared,
    )
