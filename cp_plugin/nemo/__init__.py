"""Context parallelism for NeMo's Megatron-Bridge: one line in a recipe. See ``docs/nemo.md``.

    from cp_plugin import nemo

    nemo.apply(config, provider="attention2d", grid="4x4")     # config: Bridge's ConfigContainer
    pretrain(config, forward_step)                             # Bridge's own functions

Only this package imports Bridge, and only when called.
"""

from cp_plugin.nemo.api import activate, apply

__all__ = ["activate", "apply"]
