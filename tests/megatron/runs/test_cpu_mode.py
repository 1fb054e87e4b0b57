"""CPU mode answers for CUDA while it is on and leaves no trace when it is off; each test has its own process."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import cpu_mode

from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.cpu.cuda_surface import surface
from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at how a machine without a GPU refuses")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Import Megatron once for all forked processes."""
    with cpu_mode():
        import megatron.training.training  # noqa: F401


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in its own process."""

    @functools.wraps(test)
    def run_test(**fixtures: Any) -> None:
        run_ranks(functools.partial(test, **fixtures), 1)

    return run_test


def _state() -> dict[str, Any]:
    """The current state of everything that CPU mode replaces."""
    state: dict[str, Any] = {}
    for path in surface():
        owner: Any = torch
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        state[path] = vars(owner).get(name, "absent")
    state |= {name: sys.modules.get(name, "absent") for name in cpu._HIDDEN}
    state |= _held_by_megatron()
    state["environment"] = dict(os.environ)
    state["modes"] = torch.overrides._get_current_function_mode_stack()
    state["warnings"] = list(warnings.filters)
    return state


def _held_by_megatron() -> dict[str, Any]:
    """What its modules have imported by value, or call themselves."""
    from megatron.core.datasets import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import initialize

    places = {random: "_lazy_call _lazy_init device_ctx_manager", initialize: "_warmup_jit_function"}
    places |= {utils: "compile_helpers", WrappedTorchNorm: "__new__"}
    return {f"{owner} {name}": getattr(owner, name) for owner, names in places.items() for name in names.split()}


@forked
def test_deactivate_restores_everything() -> None:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    assert not cpu.active() and not torch.cuda.is_available(), "importing it does nothing"
    before = _state()
    with cpu_mode():
        assert cpu.active() and torch.cuda.is_available()
        changed = {name for name, value in _state().items() if value is not before[name] and value != before[name]}
        assert changed == before.keys()
    assert _state() == before
    for on_cuda in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda()):
        with pytest.raises((AssertionError, RuntimeError)):
            on_cuda()


def test_announced_once_on_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        cpu.activate()
        cpu.activate()

    run_ranks(body, 2, output="all")
    out = capfd.readouterr().out
    assert out.count("cp_plugin: CPU mode (no CUDA device found)") == 1 and out.count("\n") == 1


@forked
def test_decide() -> None:
    assert cpu.decide("auto")
    with pytest.raises(ValueError, match="--cp-device cuda: torch finds no CUDA device"):
        cpu.decide("cuda")
    with pytest.raises(ValueError, match="--cp-device tpu: choose one of auto, cpu, cuda"):
        cpu.decide("tpu")
    with cpu_mode():
        assert cpu.decide("auto") and cpu.decide("cpu")
        with pytest.raises(ValueError, match="no CUDA device"):
            cpu.decide("cuda")
    torch.cuda.is_available = lambda: True
    assert cpu.decide("cpu") and not cpu.decide("auto") and not cpu.decide("cuda")


@forked
def test_device_arguments_mean_the_cpu() -> None:
    x = torch.arange(4.0)
    with cpu_mode():
        index = torch.cuda.current_device()
        made = [torch.zeros(4, device=d) for d in ("cuda", "cuda:3", index, torch.device("cuda", 0), "cpu", None)]
        made += [x.to("cuda"), x.to(index), x.to(torch.device("cuda"), torch.float64), x.to(device="cuda:0")]
        made += [x.cuda(), x.cuda(index, non_blocking=True), x.pin_memory(), torch.empty_like(x, device="cuda")]
        made += [x.new_empty(4, device="cuda"), torch.nn.Linear(4, 4, device="cuda").to("cuda").cuda()(x)]
        made += [torch.tensor([1.0] * 4, device="cuda"), torch.cuda.FloatTensor([0.0] * 4)]
        assert all(t.device.type == "cpu" and t.shape == (4,) for t in made)
        assert x.cuda() is x and x.to(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16 == x.type(torch.float16).dtype


@pytest.fixture
def fake_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable Transformer Engine, as on a machine without a GPU."""
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.20'\n")
    (package / "pytorch" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@forked
def test_transformer_engine_is_hidden(fake_transformer_engine: Path) -> None:
    with cpu_mode():
        assert importlib.util.find_spec("transformer_engine") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("transformer_engine.pytorch")
    assert importlib.import_module("transformer_engine").__version__ == "2.20"


@forked
def test_imported_transformer_engine_is_an_error(fake_transformer_engine: Path) -> None:
    import transformer_engine

    sys.modules["megatron.core"] = types.ModuleType("megatron.core")
    before = _state()
    with pytest.raises(RuntimeError, match="imported together with transformer_engine"):
        cpu.activate()
    assert not cpu.active() and _state() == before and sys.modules["transformer_engine"] is transformer_engine


def test_flags_that_cpu_mode_cannot_set() -> None:
    """Others are refused in ``test_bad_flags``; every training run needs the defaults."""
    args = argparse.Namespace(**{dest: value for dest, (value, _) in cpu.FLAGS.items()} | {"apply_rope_fusion": True})
    with pytest.raises(ValueError, match=r"apply_rope_fusion=True: not available on the CPU.*--no-rope-fusion"):
        cpu.check_flags(args)
    with pytest.raises(RuntimeError, match="no argument transformer_impl"):
        cpu.set_flag_defaults(argparse.ArgumentParser())


def test_fp8_linear_layers_are_announced_as_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    others = dict.fromkeys(("fp8", "load", "use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2"))
    args = argparse.Namespace(**{dest: value for dest, (value, _) in cpu.FLAGS.items()}, **others, rank=0)
    cpu.check_flags(args)
    assert capsys.readouterr().out == ""
    args.fp8 = "hybrid"
    cpu.check_flags(args)
    assert "--fp8-format hybrid has no effect on linear layers on the CPU" in capsys.readouterr().out


@forked
def test_compilation_is_skipped_only_with_a_compiled_helper() -> None:
    from megatron.core.datasets import utils

    from cp_plugin.megatron.cpu.mode import use_compiled_helper
    from cp_plugin.megatron.patches import patching

    original = utils.compile_helpers
    use_compiled_helper()
    assert utils.compile_helpers is not original and utils.compile_helpers() is None
    patching.undo("process")
    assert utils.compile_helpers is original
    sys.modules["megatron.core.datasets.helpers_cpp"] = None
    use_compiled_helper()
    assert utils.compile_helpers is original
