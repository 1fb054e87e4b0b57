"""Source fingerprints of the Megatron-Core symbols that the plugin replaces. Generated, do not edit:

    python -m cp_plugin.megatron.patches.digest DIRECTORY...

which adds the sources of directories with a ``megatron`` package.
"""

from __future__ import annotations

# symbol -> fingerprint -> the megatron-core versions whose source has it
FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron.training.arguments:add_megatron_arguments": {
        "c4795ec539c1af6d": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "6014f4f296f309c7": ("0.18.0", "0.18.1", "0.18.2"),
        "b4c2c07f52edda66": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.training.arguments:validate_args": {
        "dc4a8ae29bd22ead": ("0.17.0", "0.17.0rc0"),
        "c072bb24a2311a13": ("0.17.1",),
        "80c5712b1f7f2cc0": ("0.18.0", "0.18.1"),
        "ced3bb751a2448ec": ("0.18.2",),
        "d5b1799666842d87": ("0.19.0", "0.19.1", "0.19.2"),
        "09aaa53dcbe5fee2": ("0.20.0",),
        "b9e2e64d21fca187": ("0.20.0",),
    },
    "megatron.core.parallel_state:initialize_model_parallel": {
        "3e273608ce6805de": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "3f7a5ab43e0ee555": ("0.18.0", "0.18.1", "0.18.2"),
        "cdb41fe0782f9be9": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.training.checkpointing:_load_base_checkpoint": {
        "abb6fca52134cfd6": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "2b1a3d059d7f708e": ("0.18.0", "0.18.1", "0.18.2"),
        "b3911ee2290b0113": ("0.19.0", "0.19.1", "0.19.2"),
        "f363d0ac552e2177": ("0.20.0",),
    },
    "megatron.core.utils:get_batch_on_this_cp_rank": {
        "c80146f9f017dbae": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "f377981828801b84": ("0.18.0", "0.18.1", "0.18.2"),
        "ce0d9e1bf2bebd6f": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
        "ae3ad941aa6b5ef5": ("0.20.0",),
    },
    "megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing": {
        "3d3097fe26965581": ("0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.utils:get_thd_batch_on_this_cp_rank": {
        "162e854da22b8e50": ("0.17.0", "0.17.0rc0", "0.17.1"),
    },
    "megatron.core.context_parallel.utils:get_batches_on_this_cp_rank": {},
    "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank": {
        "7f57f130b8980bd9": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache": {
        "8147248fd3074a78": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
        ),
        "3ba107a6fd57c354": ("0.20.0",),
    },
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd": {
        "3816ec3dd307fcc1": ("0.17.0", "0.17.0rc0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"),
        "159f731e07395a3d": ("0.19.0", "0.19.1", "0.19.2"),
        "e83eab1e586aba33": ("0.20.0",),
    },
    "megatron.core.models.common.embeddings.rope_utils:_get_thd_freqs_on_this_cp_rank": {
        "a58c0e6b8b5062ad": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd": {
        "bd2e2ea6dec3bb96": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2"),
        "7588b744b31c1acd": ("0.19.1", "0.19.2"),
        "de6a42b44ce74f81": ("0.20.0",),
    },
    "megatron.core.models.common.embeddings.rope_utils:_rotate_half": {
        "c1d83d6b223082c1": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.transformer.multi_token_prediction:roll_tensor": {
        "5099cbc59d1e8d8a": ("0.17.0", "0.17.0rc0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"),
        "abaa6b57695c24ca": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
        "2fee00acb0a397ce": ("0.20.0",),
    },
    "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq": {
        "459a0db1418aa4c5": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2"),
        "1f92071dbbcd48f1": ("0.20.0",),
    },
    "megatron.core.transformer.multi_token_prediction:process_mtp_loss": {
        "09e6d77733a5f3f8": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "da67339336d25ba6": ("0.18.0", "0.18.1", "0.18.2"),
        "fa2192497f3eb0ef": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler": {
        "d9c6375c117278e3": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss": {
        "d021ec769144a8fb": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "e4ec52acab4c5c26": ("0.18.0", "0.18.1", "0.18.2"),
        "49e8a6aafb2e5265": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.pipeline_parallel.schedules:_get_moe_loss_scale": {
        "c036f8997803c619": ("0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.pipeline_parallel.schedules:_get_mtp_loss_scale": {
        "f8cf78afdd432fe2": ("0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.models.backends:LocalSpecProvider.core_attention": {
        "71ca4456c62e8dc0": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__": {
        "50df7938ff943a1e": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": {
        "ca9d42c58de33f7c": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax": {
        "f13f649c0e40a64a": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.fusions.fused_softmax:SoftmaxOne": {
        "645b0f884fa7ea0b": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.transformer.utils:attention_mask_func": {
        "c9155b8bb91ed316": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.transformer.utils:get_sliding_window_causal_mask": {
        "fcbafafabb5bfe7f": ("0.17.0rc0", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention": {
        "ad0825788aa430b8": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.extensions.transformer_engine:TEDotProductAttention": {
        "5c04c70bc38b7dff": ("0.17.0", "0.17.0rc0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"),
        "ca290534ee29c862": ("0.19.0", "0.19.1", "0.19.2"),
        "958c867333dfae99": ("0.20.0",),
    },
    "megatron.core.post_training.modelopt.gpt.model_specs:get_gpt_modelopt_spec": {
        "c8fd3041e407e968": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.training.training:setup_model_and_optimizer": {
        "b2abbe80c2a08844": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "44f876faedbdf2ab": ("0.18.0", "0.18.1", "0.18.2"),
        "aa31564ce620a0ae": ("0.19.0", "0.19.1", "0.19.2"),
        "449dba1c7b349b65": ("0.20.0",),
        "e28e647c665ade21": ("0.20.0",),
    },
    "megatron.training.training:training_log": {
        "43ff41901a26f7f4": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "ffd45fbe92f8218a": ("0.18.0", "0.18.1", "0.18.2"),
        "2d1afc6411044c6c": ("0.19.0", "0.19.1", "0.19.2"),
        "c62d79af7d530a07": ("0.20.0",),
    },
    "megatron.core.tensor_parallel.random:checkpoint": {
        "fdf67f2afe49893f": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "9501e4192233535e": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.extensions.transformer_engine:te_checkpoint": {
        "13b84f3e24165572": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func": {
        "ccf45a0356ef1d74": ("0.17.0", "0.17.0rc0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"),
        "f4d1cb817389df5f": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.transformer.moe.router:TopKRouter.forward": {
        "db2f614da31cb325": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count": {
        "af4760d9a28d13bc": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": {
        "a86f562af1b87ef3": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "088816e8e8eaa0bf": ("0.18.0", "0.18.1", "0.18.2"),
        "17b4e8e33e3ae844": ("0.19.0", "0.19.1", "0.19.2"),
        "c3c243cb94e573a0": ("0.20.0",),
    },
    "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": {
        "b1c79d0a950dfdd4": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.training.training:num_floating_point_operations": {
        "a7b50fef471f34a2": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "17bdeee41aa02c32": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
        "a9513a3cf07d3f2e": ("0.20.0",),
    },
    "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing": {
        "b049c8d15e0db7ee": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing": {
        "bee15a5972792d70": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm": {
        "149c1a3c25a9c9b4": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens": {
        "c5efe596ee37ba12": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
        "f45acc57ae4e103f": ("0.18.0", "0.18.1", "0.18.2"),
    },
    "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet.forward": {
        "97fb3a155e124261": ("0.19.0", "0.19.1", "0.19.2"),
        "7248af57d78e7739": ("0.20.0",),
        "9be483b5c9d2bf08": ("0.17.0", "0.17.0rc0", "0.17.1"),
        "1f87ff13163eeb23": ("0.18.0", "0.18.1", "0.18.2"),
        "27710724d13d2da9": ("0.19.0",),
        "0c8c22b3ece040d6": ("0.20.0",),
    },
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__": {
        "f4f31bb8a33941cd": ("0.18.0", "0.18.1", "0.18.2"),
        "4be3155eeb4a1194": ("0.19.0", "0.19.1", "0.19.2"),
        "f0735f5fead63475": ("0.20.0",),
    },
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__": {
        "8562b3aee397c8a7": ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
        "9e8e0edaf240a2ec": ("0.20.0",),
    },
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__": {
        "3fd512b6f6d91100": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
        ),
        "00563f45de81d20b": ("0.20.0",),
    },
    "megatron.training.initialize:_warmup_jit_function": {
        "273327007a57f35d": ("0.17.0", "0.17.0rc0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"),
        "d0f013b7f8e86264": ("0.19.0", "0.19.1", "0.19.2", "0.20.0"),
    },
    "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear": {
        "524ef3b2a09812c8": ("0.20.0",),
    },
    "megatron.core.datasets.utils:compile_helpers": {
        "d1702325a991c54e": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.utils:is_te_min_version": {
        "995636d847c573e8": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
    "megatron.core.parallel_state:create_group": {
        "012b56305cd94761": (
            "0.17.0",
            "0.17.0rc0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.20.0",
        ),
    },
}
