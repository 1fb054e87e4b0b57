"""Probes are about all of Megatron that they run: an edit of a helper is noticed, and the probe decides."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.hooks import OF_RUN, START_UP
from cp_plugin.megatron.patches.patching import Patch

PROBED = [patch for patch in (*START_UP, *OF_RUN) if patch.contract.probe is not None]
PLUMBING = ("parallel_state", "model_parallel_config", "transformer_config", "cuda_graph_config", "packed_seq_params")
"""Modules of settings and groups, which probes make themselves."""
SMALL = (
    "init_method_normal",
    "scaled_init_method_normal",
    "divide",
    "ensure_divisibility",
    "GlobalMemoryBuffer",
    "get_tensor_device",
    "build_module",
    "deprecate_inference_params",
    "nvtx_range_pop",
    "nvtx_range_push",
)
SHARED = ("is_layer_window_attention", "set_tensor_model_parallel_attributes")
"""Called by the plugin's attention, too."""
UNUSED = ("_get_experimental_attention_variant_loss_scale_func",)
"""Of parts that are refused."""

pytestmark = pytest.mark.usefixtures("adapter")


@pytest.mark.parametrize("target", [patch.target for patch in PROBED])
def test_what_a_probe_runs_is_in_its_contract(target: str) -> None:
    if not compat.has(target):
        pytest.skip("not in this version")
    patch = next(patch for patch in PROBED if patch.target == target)
    assert patch.contract.probe is not None
    original = patching.original(target)
    plain = original.__func__ if isinstance(original, staticmethod) else original
    named = [place for one in (target, *patch.contract.also) for place in compat.places(one)]
    left_out = {one for one in _run_by(patch, plain) if not any(_inside(one, place) for place in named)}
    assert not left_out


def _run_by(patch: Patch, original: Any) -> set[str]:
    """``module:qualified.name`` of Megatron's functions that a probe calls, on any thread."""
    seen = set[str]()
    root = Path(str(sys.modules["megatron.core"].__file__)).parents[2]

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(root / "megatron"):
            return
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        name = frame.f_code.co_qualname
        if module.rpartition(".")[2] not in PLUMBING and name.partition(".")[0] not in (*SMALL, *SHARED, *UNUSED):
            seen.add(f"{module}:{name}")

    assert patch.contract.probe is not None
    replacement = patch.make(patching.original(patch.target))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert patch.contract.probe(original, replacement) is None
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name for name in seen if "MegatronModule" not in name}


def _inside(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")
