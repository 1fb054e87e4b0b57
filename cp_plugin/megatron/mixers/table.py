"""All layers of Megatron that mix tokens: a new one is a file with a ``Mixer``, and an entry here.

* +   attention, also multi-latent: the spec gets the plugin's class (``spec``)
E -   dense and expert feed-forward: tokens are independent, nothing to do
M G   Mamba, gated delta net
D     refused (``rules.models``)

All layers compute in one layout, unless ``--linear-cp-layout contiguous`` makes Megatron's layout manager convert
zigzag tokens around attention; then everything else is contiguous (``runtime.batch_layout``).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.mixers import core_attention, gated_delta_net, linear_attention, mamba
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.patches.patching import installed

MIXERS = (core_attention.MIXER, linear_attention.MIXER, mamba.MIXER, gated_delta_net.MIXER)
PATCHES = tuple(patch for mixer in MIXERS for patch in mixer.patches)


def computed_in(module: torch.nn.Module) -> Mixer | None:
    """The mixer that a provider computes in this module."""
    return next((mixer for mixer in MIXERS if mixer.computes(module)), None)


def keeps_layout(module: torch.nn.Module) -> bool:
    """Return True for a layer without attention that mixes tokens in the plugin's layout."""
    inner: Any = module.self_attention if isinstance(module, TransformerLayer) else getattr(module, "mixer", module)
    where = type(inner).__module__
    if runtime.settings().delta_net is not None and "gated_delta" in where:
        return computed_in(inner) is not None  # not its later variants
    return mamba.REORDER in installed() and where.startswith(compat.STATE_SPACES)


def converts(module: torch.nn.Module) -> bool:
    """Return True if Megatron's layout manager (0.20 and newer) converts tokens between the layers of this stack."""
    manager = getattr(module, "_cp_layout_manager", None)
    return manager is not None and manager.requires_conversion
