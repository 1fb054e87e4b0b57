"""Where the supported versions of Megatron-Core differ, and the only file that asks which one this is.

A difference is a function here, with the version since which there is one: when that is the oldest one supported, the
function goes. What the functions that the plugin replaces look like in each version is in ``patches.fingerprints``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from cp_plugin.core.versions import MEGATRON_RANGE, version_tuple

MOVED: Mapping[str, tuple[str, ...]] = {
    "megatron.core.ssm.mamba_context_parallel": ("megatron.core.ops.ssm.mamba2.context_parallel",),
    "megatron.core.ssm.gated_delta_net.common": ("megatron.core.ops.ssm.gated_delta.common",),
}
"""A module -> where later versions have what was in it (Megatron-LM #7239); a move is a line here."""
STATE_SPACES = ("megatron.core.ssm", "megatron.core.ops.ssm")
"""The packages that hold the layers of Mamba and gated delta net."""


def find(target: str) -> tuple[Any, Any]:
    """(the module or class that defines a symbol, the symbol), wherever this version has it.

    A module that only forwards to another place does not define it: replacing it there would do nothing.

    Args:
        target: ``"package.module:qualified.name"``, as in the oldest supported version.

    Raises:
        ValueError: if it is nowhere.
    """
    module, _, qualname = target.partition(":")
    *path, name = qualname.split(".")
    places = (module, *MOVED.get(module, ()))
    for owner in map(_module, places):
        for part in path:
            owner = vars(owner).get(part) if owner is not None else None
        if owner is not None and name in vars(owner):
            return owner, vars(owner)[name]
    package = module.partition(".")[0]
    raise ValueError(
        f"{qualname} is not in {' or '.join(places)}, and cp_plugin needs it: this {package} is newer than this "
        f"cp_plugin, or was edited. Use an unmodified supported version (megatron-core{MEGATRON_RANGE})"
    )


def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it needs is not
        return None


def megatron_version() -> str:
    """The release of the megatron-core that would be, or is, imported.

    Without the commit that Megatron appends: it is that of whatever git repository surrounds the installation.
    """
    from megatron.core import package_info

    return package_info.__version__.partition("+")[0]


def counts_end_of_document(version: str) -> bool:
    """Since 0.18 the null tokenizer's ``--vocab-size`` counts the end-of-document token; before, it came on top."""
    return version_tuple(version) >= (0, 18)


def has_hybrid_models(version: str) -> bool:
    """Since 0.18 there is ``HybridModel``; before, it had another name."""
    return version_tuple(version) >= (0, 18)


def builds_gated_delta_net(version: str) -> bool:
    """Since 0.19 hybrid models can have layers of gated delta net without Transformer Engine."""
    return version_tuple(version) >= (0, 19)


def weakens_expert_losses(version: str) -> bool:
    """Before 0.19 the routers' own losses are too small where losses are summed per token."""
    return version_tuple(version) < (0, 19)


def masks_expert_bias(version: str) -> bool:
    """Since 0.20 routers can leave padding out of what moves their expert bias; before, they end in an error there."""
    return version_tuple(version) >= (0, 20)


def asks_for_inference_layers(version: str) -> bool:
    """Since 0.20 layers of multi-token prediction ask for classes that there are with Transformer Engine only."""
    return version_tuple(version) >= (0, 20)


def slices_in_several_layouts(version: str) -> bool:
    """Since a commit of 0.20 (Megatron-LM #6912) scripts may ask for a batch in several layouts at once."""
    return version_tuple(version) >= (0, 20) and _module("megatron.core.context_parallel.utils") is not None


def parse_before_initialize() -> None:
    """Since 0.18 arguments are parsed and validated ahead of ``initialize_megatron``; before, it did so itself."""
    from megatron.training import arguments, initialize

    if "extra_args_provider" not in inspect.signature(initialize.initialize_megatron).parameters:
        arguments.parse_and_validate_args()


def config_for_pretrain(pretrain: Callable[..., None]) -> dict[str, Any]:
    """Since 0.18 ``pretrain`` is given a container of configurations, made of parsed arguments."""
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        return {}
    from megatron.training import argument_utils, arguments

    return {"cfg_container": argument_utils.pretrain_cfg_container_from_args(arguments.parse_and_validate_args())}


def not_hybrid(slicer: Callable[..., Any]) -> dict[str, bool]:
    """Since 0.18 ``get_batch_on_this_cp_rank`` is told that context parallelism is not hybrid."""
    return {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(slicer).parameters else {}


def inference_mode() -> Any | None:
    """Since 0.18 models ask ``InferenceMode`` whether they are in an inference; None: there is no such class."""
    from megatron.core.inference import utils

    return getattr(utils, "InferenceMode", None)


def extensions() -> Sequence[ModuleType]:
    """What a Megatron with ``patches/megatron-lm`` asks for flags; none: no release does, as it is."""
    from megatron.training import arguments

    return getattr(arguments, "plugins", list)()
