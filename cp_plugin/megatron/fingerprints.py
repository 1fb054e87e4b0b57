"""Source fingerprints of the Megatron-Core symbols that the plugin replaces. Generated, do not edit:

    python -m cp_plugin.megatron.digest DIRECTORY...

with one directory per supported version that holds its ``megatron`` package.
"""

from __future__ import annotations

# symbol -> fingerprint -> the megatron-core versions whose source has it
FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron.training.arguments:add_megatron_arguments": {
        "c4795ec539c1af6d": ("0.17.0", "0.17.1"),
        "6014f4f296f309c7": ("0.18.0", "0.18.1", "0.18.2"),
        "b4c2c07f52edda66": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.training.arguments:parse_args": {
        "e9e9e8c3f2923b41": ("0.17.0", "0.17.1"),
        "ca312c0f4a29e20c": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.training.arguments:validate_args": {
        "dc4a8ae29bd22ead": ("0.17.0",),
        "c072bb24a2311a13": ("0.17.1",),
        "80c5712b1f7f2cc0": ("0.18.0", "0.18.1"),
        "ced3bb751a2448ec": ("0.18.2",),
        "d5b1799666842d87": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.parallel_state:initialize_model_parallel": {
        "3e273608ce6805de": ("0.17.0", "0.17.1"),
        "3f7a5ab43e0ee555": ("0.18.0", "0.18.1", "0.18.2"),
        "cdb41fe0782f9be9": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.parallel_state:destroy_model_parallel": {
        "2c0e4b2387b6ef86": ("0.17.0", "0.17.1"),
        "a60b57b9c358d006": ("0.18.0", "0.18.1", "0.18.2"),
        "2da040666a30f38e": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.utils:get_batch_on_this_cp_rank": {
        "c80146f9f017dbae": ("0.17.0", "0.17.1"),
        "f377981828801b84": ("0.18.0", "0.18.1", "0.18.2"),
        "ce0d9e1bf2bebd6f": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank": {
        "7f57f130b8980bd9": ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.models.backends:LocalSpecProvider.core_attention": {
        "71ca4456c62e8dc0": ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention": {
        "ad0825788aa430b8": ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.training.training:setup_model_and_optimizer": {
        "b2abbe80c2a08844": ("0.17.0", "0.17.1"),
        "44f876faedbdf2ab": ("0.18.0", "0.18.1", "0.18.2"),
        "aa31564ce620a0ae": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.training.training:training_log": {
        "43ff41901a26f7f4": ("0.17.0", "0.17.1"),
        "ffd45fbe92f8218a": ("0.18.0", "0.18.1", "0.18.2"),
        "2d1afc6411044c6c": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": {
        "b1c79d0a950dfdd4": ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "megatron.training.training:num_floating_point_operations": {
        "a7b50fef471f34a2": ("0.17.0", "0.17.1"),
        "17bdeee41aa02c32": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
}
