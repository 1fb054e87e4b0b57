"""A training script independent of the plugin: a GPT on mock data, using Megatron's functions only.

It replaces Megatron-LM's pretrain_gpt.py, which the wheels lack.
"""

import inspect
from functools import partial

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, get_args, pretrain


def datasets(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="100,0,0",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


def model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=args.transformer_impl == "transformer_engine", normalization=args.normalization
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


def loss(mask, output):
    mask = mask.view(-1).float()
    total, tokens = (output.view(-1).float() * mask).sum(), mask.sum().detach().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(batches, gpt):
    batch = {name: x.cuda() for name, x in next(batches).items()}
    slicer = utils.get_batch_on_this_cp_rank
    offered = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
    absent = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
    batch |= dict.fromkeys(name for name in absent if name not in batch)
    batch = slicer(batch, **{name: x for name, x in offered.items() if name in inspect.signature(slicer).parameters})
    output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss, batch["loss_mask"])


if __name__ == "__main__":
    datasets.is_distributed = True
    args = arguments.parse_and_validate_args()
    parts = {}
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        parts["cfg_container"] = pretrain_cfg_container_from_args(args)
    pretrain(
        train_valid_test_dataset_provider=datasets,
        model_provider=model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **parts,
    )
