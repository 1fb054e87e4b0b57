"""Differences between the supported versions of Megatron-Core; the only file that branches on the version.

Each difference is a function, to be deleted with the last version that needs it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Mapping, Sequence
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cp_plugin.engine.common.versions import MEGATRON_RANGE, version_tuple

if TYPE_CHECKING:
    from torch import Tensor

MOVED: Mapping[str, tuple[str, ...]] = {
    "megatron.core.ssm.mamba_context_parallel": (
        "megatron.core.ops.ssm.mamba2.context_parallel",
        "megatron.core.ssm.mamba_context_parallel",
    ),
    "megatron.core.ssm.mamba_layer": ("megatron.core.transformer.mamba_layer", "megatron.core.ssm.mamba_layer"),
    "megatron.core.ssm.mamba_mixer": ("megatron.core.ops.ssm.mamba2.mixer", "megatron.core.ssm.mamba_mixer"),
    "megatron.core.ssm.mlp_layer": ("megatron.core.transformer.mlp_layer", "megatron.core.ssm.mlp_layer"),
    "megatron.core.ssm.gated_delta_net.common": (
        "megatron.core.ops.ssm.gated_delta.common",
        "megatron.core.ssm.gated_delta_net.common",
        "megatron.core.ssm.gated_delta_net.gdn",
        "megatron.core.ssm.gated_delta_net",
    ),
    "megatron.core.ssm.gated_delta_net.gdn": (
        "megatron.core.ops.ssm.gated_delta.gdn",
        "megatron.core.ssm.gated_delta_net.gdn",
        "megatron.core.ssm.gated_delta_net",
    ),
}
"""Module -> where any version has it, newest first, since later ones (Megatron-LM #7239) warn of the others."""
RENAMED = "_GDNBase", "GatedDeltaNet"
"""A class, and its name in other versions."""
STATE_SPACES = ("megatron.core.ssm", "megatron.core.ops.ssm")
"""Packages with the layers of Mamba and gated delta net."""


def find(target: str) -> tuple[Any, Any]:
    """(owner, symbol): the module or class that defines a symbol in this version, and the symbol.

    Modules that only re-export a symbol are skipped: replacing it there would have no effect.

    Args:
        target: ``"package.module:qualified.name"`` in the oldest supported version.

    Raises:
        ValueError: if it is not found.
    """
    for place in places(target):
        module, _, qualname = place.partition(":")
        *path, name = qualname.split(".")
        owner = _module(module)
        for part in path:
            owner = vars(owner).get(part) if owner is not None else None
        if owner is not None and name in vars(owner):
            return owner, vars(owner)[name]
    module, _, qualname = target.partition(":")
    modules = dict.fromkeys(place.partition(":")[0] for place in places(target))
    package = module.partition(".")[0]
    raise ValueError(
        f"{qualname} is not in {' or '.join(modules)}, and cp_plugin needs it: this {package} is newer than this "
        f"cp_plugin, or was edited. Use an unmodified supported version (megatron-core{MEGATRON_RANGE})"
    )


def places(target: str) -> list[str]:
    """Return where any version has a symbol, in the form of ``target``."""
    module, _, qualname = target.partition(":")
    names = dict.fromkeys((qualname, qualname.replace(*RENAMED)))
    return [f"{place}:{name}" for place, name in product(MOVED.get(module, (module,)), names)]


def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but not one of its imports
        return None


def megatron_version() -> str:
    """The release of megatron-core, without the commit: Megatron appends that of any surrounding git repository."""
    from megatron.core import package_info

    return package_info.__version__.partition("+")[0]


def delta_net_takes_exchange() -> bool:
    """Since 0.19 gated delta net has the parameter ``cp_comm_type``, which its layer always passes if it is set."""
    _, layer = find("megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet")
    return "cp_comm_type" in inspect.signature(layer).parameters


def softcap(config: Any) -> float | None:
    """The limit of attention's scores; None: there is none. Only later versions have it."""
    return getattr(config, "attn_logit_softcapping", None)


def hybrid_pattern(*owners: Any) -> str:
    """The pattern of a hybrid model, of the first of these arguments or configurations that has one; empty: none."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((pattern for one in owners for name in names if (pattern := getattr(one, name, None))), "")


def weakens_expert_losses(version: str) -> bool:
    """Before 0.19 router losses are too small with losses per token."""
    return version_tuple(version) < (0, 19)


def masks_expert_bias(version: str) -> bool:
    """Since 0.20 routers can mask padding out of the expert bias; before, they fail."""
    return version_tuple(version) >= (0, 20)


def whole_samples(args: argparse.Namespace) -> dict[str, int]:
    """Fields of ``PackedSeqParams`` by which experts balance each sample of a pack by itself (since 0.19).

    None with context parallelism: no rank has whole samples.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    known = "tokens_per_sample" in inspect.signature(PackedSeqParams).parameters
    return {"tokens_per_sample": args.seq_length} if known and args.context_parallel_size == 1 else {}


def logged_of_experts(name: str) -> Tensor | None:
    """Megatron's sums of an expert loss since the last log, by layer; None if none was logged yet."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # since 0.19
        entry = moe_utils.get_moe_metrics_tracker().metrics.get(name)
        return None if entry is None else entry.values
    return moe_utils.get_moe_layer_wise_logging_tracker().get(name, {}).get("values")


def extensions() -> Sequence[ModuleType]:
    """Extension modules of a Megatron patched with ``patches/megatron-lm``; empty in releases."""
    from megatron.training import arguments

    return getattr(arguments, "plugins", list)()
