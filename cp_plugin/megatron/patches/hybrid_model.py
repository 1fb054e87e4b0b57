"""Megatron's ``HybridModel`` gets the plugin's core attention by its spec; on the CPU, a spec for the CPU."""

from __future__ import annotations

from cp_plugin.megatron import runtime
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.layers import spec
from cp_plugin.megatron.patches.patching import Call, wraps


@wraps(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    "attention of the spec of hybrid models; on the CPU, a spec without Transformer Engine",
    "hybrid_stack_spec config",
    called_by="the model builder, with a spec that names Megatron's classes",
    otherwise="a hybrid model would keep Megatron's own attention",
    when=lambda run: run.hybrid and (run.settings.active or cpu.active()),
)
def replace_init(call: Call) -> None:
    """Give ``HybridModel`` the plugin's core attention, and on the CPU a spec without Transformer Engine."""
    stack = call["hybrid_stack_spec"]
    if cpu.active():
        from cp_plugin.megatron.models import hybrid  # imports much of Megatron

        stack = hybrid.on_cpu(stack, call["config"], call.arguments.get("hybrid_layer_pattern") or "")
    call.original(hybrid_stack_spec=spec.with_core_attention(stack) if runtime.settings().active else stack)
