"""The backend that ``--cp-backend auto`` chooses per GPU and installed libraries, and why; needs no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import fake_te
import pytest
import torch
from fake_flash import FA3_2_8, FA3_LATER, Machine

from cp_plugin import Options, Problem
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.kernels.backends import devices, flash
from cp_plugin.engine.kernels.backends.flash import Flash

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A GPU and torch with cuDNN 9.20; no attention library."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    fake_te.forget()
    yield Machine(monkeypatch)
    flash._chosen.cache_clear()
    fake_te.forget()


INSTALL = {
    "2": lambda machine: machine.flash2(),
    "3": lambda machine: machine.flash3(FA3_LATER),
    "4": lambda machine: machine.flash4(),
    "te": lambda machine: fake_te.install(machine.patch),
}
TAKEN = {
    "an H100 and torch alone": ((9, 0), "", (128, 128), "cudnn", None),
    "an H100 with everything": ((9, 0), "2 3 4 te", (128, 128), "flash", 3),
    "an H100 without version 3": ((9, 0), "2 4 te", (128, 128), "te", None),
    "an H100 with version 4": ((9, 0), "2 4", (64, 64), "cudnn", None),
    "an H100, MLA": ((9, 0), "", (192, 128), "cudnn", None),
    "an H100, MLA, version 3": ((9, 0), "3", (192, 128), "flash", 3),
    "an H100, large heads": ((9, 0), "", (256, 256), "cudnn", None),
    "a B200 and torch alone": ((10, 0), "", (128, 128), "cudnn", None),
    "a B200 with version 4": ((10, 0), "2 3 4 te", (128, 128), "flash", 4),
    "a B300 with version 4": ((10, 3), "4", (192, 128), "flash", 4),
    "a B200 with version 3, built for another": ((10, 0), "3", (128, 128), "cudnn", None),
    "a B200, large heads": ((10, 0), "4", (256, 256), "sdpa", None),
    "an A100": ((8, 0), "", (128, 128), "sdpa", None),
    "an A100 with everything": ((8, 0), "2 3 4 te", (128, 128), "sdpa", None),
    "an L40S": ((8, 9), "2", (256, 256), "sdpa", None),
    "an RTX PRO 6000": ((12, 0), "2 4", (128, 128), "sdpa", None),
    "a V100": ((7, 0), "2", (64, 64), "reference", None),
    "odd heads on an H100": ((9, 0), "3", (60, 60), "triton", None),
}


@pytest.mark.parametrize(("capability", "installed", "sizes", "name", "generation"), TAKEN.values(), ids=TAKEN)
def test_auto_choice(
    machine: Machine,
    capability: tuple[int, int],
    installed: str,
    sizes: tuple[int, int],
    name: str,
    generation: int | None,
) -> None:
    for library in installed.split():
        INSTALL[library](machine)
    machine.gpu(capability)
    chosen, reason = backends.choose("auto", CallInfo(CUDA, torch.bfloat16, *sizes))
    assert (chosen.name, getattr(chosen, "generation", None)) == (name, generation), reason
    assert f"compute capability {capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "reason"),
    [
        ((7, 0), torch.bfloat16, (64, 64), "the kernels need a GPU of compute capability 8.0 (Ampere) or newer"),
        ((9, 0), torch.float64, (64, 64), "the kernels take bfloat16, float16 and float32, not torch.float64"),
        ((9, 0), torch.bfloat16, (64, 512), "the kernels take head sizes up to 256, not 512"),
    ],
)
def test_our_kernels_by_name_where_they_do_not_run(
    machine: Machine, capability: tuple[int, int], dtype: torch.dtype, sizes: tuple[int, int], reason: str
) -> None:
    machine.gpu(capability)
    with pytest.raises(ValueError) as refused:
        backends.choose("triton", CallInfo(CUDA, dtype, *sizes))
    assert reason in str(refused.value)


def test_reason_names_rejected_candidates(machine: Machine) -> None:
    _, reason = backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 128, 128))
    assert reason.startswith("cudnn on Hopper (compute capability 9.0); not flash 3: flash-attn 3 is not installed: ")
    assert "; not te: Transformer Engine is not installed" in reason
    INSTALL["3"](machine)
    assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 128, 128))[1] == (
        "first choice for torch.bfloat16 on Hopper (compute capability 9.0)"
    )


def test_no_plans_for_packs_and_where_lengths_vary(machine: Machine) -> None:
    fake_te.install(machine.patch)
    dense, packed = Problem(size=2), Problem(size=2, documents=True)
    for problem, plans in ((dense, False), (packed, True)):
        chosen = blocks.choose(Options(), problem, CUDA, plans=plans)
        assert chosen.backends == ("sdpa", "triton") and "te: it would build a plan for each new shape" in chosen.why
    assert blocks.choose(Options(), dense, CUDA).backends == ("te", "triton")
    assert blocks.choose(Options(backend="te"), packed, CUDA).backends == ("te",)
    INSTALL["3"](machine)
    assert blocks.choose(Options(), packed, CUDA).backends == ("flash", "triton")


def test_other_dtypes_and_deterministic_mode(machine: Machine) -> None:
    assert backends.choose("auto", CallInfo(CUDA, torch.float16, 128, 128))[0].name == "cudnn"
    assert backends.choose("auto", CallInfo(CUDA, torch.float32, 128, 128))[0].name == "triton"
    assert backends.choose("auto", CallInfo(CUDA, torch.float64, 128, 128))[0].name == "reference"
    machine.patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    chosen, reason = backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 128, 128))
    assert chosen.name == "sdpa" and "cudnn: torch does not consider cuDNN's attention deterministic" in reason
    machine.flash3(FA3_2_8)
    assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 128, 128))[0] == Flash(generation=3)


def test_head_sizes_of_older_cudnn(machine: Machine) -> None:
    machine.patch.setattr(torch.backends.cudnn, "version", lambda: 90900)
    for sizes in ((256, 256), (192, 128)):
        assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, *sizes))[0].name == "sdpa"
    machine.gpu((10, 0))
    assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 192, 128))[0].name == "sdpa"
    machine.patch.setattr(torch.backends.cudnn, "version", lambda: 91100)
    assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 192, 128))[0].name == "cudnn"
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert backends.choose("auto", CallInfo(CUDA, torch.bfloat16, 128, 128))[0].name == "sdpa"


def test_every_line_of_the_table_has_a_kernel_and_a_source() -> None:
    assert [f.since for f in devices.FAMILIES] == sorted(f.since for f in devices.FAMILIES)
    for family in devices.FAMILIES:
        assert family.order_source and family.order[-1].backend == "reference"
        assert len(set(family.order)) == len({c.title for c in family.order})
        for candidate in family.order:
            assert candidate.backend in backends.names() and candidate.source
            assert (candidate.rate is None) == (candidate.backend in ("triton", "reference"))
            assert family.candidate(candidate.backend, candidate.generation) == candidate
        rates = [c.rate for c in family.order if c.rate is not None]
        assert family.scale is None or all(r.forward > family.scale.own.forward for r in rates if r.forward > 400)


def test_a_gpu_newer_than_the_table() -> None:
    assert devices.family((13, 0)) is devices.FAMILIES[-1]
    titles = [devices.family(c).title for c in ((8, 6), (8, 9), (9, 0), (10, 3), (11, 0))]
    assert titles == ["Ampere, Ada", "Ampere, Ada", "Hopper", "Blackwell", "Blackwell"]
