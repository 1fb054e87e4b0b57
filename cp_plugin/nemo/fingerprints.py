"""Source fingerprints of the functions of Bridge that the plugin replaces, made by ``megatron.patches.digest``."""

from __future__ import annotations

# symbol -> fingerprint -> the megatron-bridge versions whose source has it
FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron.bridge.training.setup:setup": {"76a61c05fc1e2c30": ("0.6.2",)},
    "megatron.bridge.training.gpt_step:_partition_packed_batch_for_cp": {"ff6487e111a238d4": ("0.6.2",)},
    "megatron.bridge.training.eval_context_parallel_rebinding:install_pg_collection": {"579c1f7d8d923e9d": ("0.6.2",)},
}
