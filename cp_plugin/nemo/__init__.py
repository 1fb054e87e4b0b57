"""Context parallelism for NeMo: one line on a recipe of Megatron-Bridge. See ``docs/nemo.md``.

    from cp_plugin import nemo

    nemo.apply(config, provider="attention2d", grid="4x4")     # config: a ConfigContainer of Bridge
    pretrain(config, forward_step)                             # both Bridge's own

The only part of the plugin that imports Bridge, and it does so when it is called.
"""

from cp_plugin.nemo.api import activate, apply

__all__ = ["activate", "apply"]
