"""What the self-check costs, and leaves as it is: batch sizes, memory, settings that a pass would disturb."""

from __future__ import annotations

import pytest
from case import Case, cases
from nightly import nightly, one_case
from training import train

from cp_plugin.engine.core.layout import LAYOUTS
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron.selfcheck import tiny_batch

pytestmark = pytest.mark.usefixtures("adapter")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("size", "chunk"), [(1, 128), (2, 128), (3, 128), (16, 128), (24, 80), (64, 32), (512, 16)])
def test_gpu_ranks_have_two_chunks_of_up_to_128_tokens(name: str, size: int, chunk: int) -> None:
    layout = get_layout(name)
    tokens = tiny_batch.tokens_for(layout, size, cuda=True)
    assert tokens == 2 * chunk * size
    for index in range(size):
        assert all(len(segment) % chunk == 0 for segment in layout.segments(tokens, size, index))


@pytest.mark.parametrize(("name", "size", "tokens"), [("zigzag", 2, 32), ("zigzag", 64, 128), ("striped", 3, 33)])
def test_cpu_ranks_have_few_tokens(name: str, size: int, tokens: int) -> None:
    assert tiny_batch.tokens_for(get_layout(name), size, cuda=False) == tokens


DRAWN = ("--moe-router-force-load-balancing", "--moe-input-jitter-eps 1e-2 --init-method-std 0.2")


@pytest.mark.parametrize("flags", DRAWN)
def test_routers_that_draw_are_compared_without_drawing(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"--num-experts 4 {flags} --context-parallel-size 2 --cp-provider ring --cp-layout zigzag")
    assert capfd.readouterr().out.count("self-check passed: a step") == 1


def _as_on_a_gpu() -> None:
    tokens_for = tiny_batch.tokens_for
    tiny_batch.tokens_for = lambda layout, size, *, cuda: tokens_for(layout, size, cuda=True)


@nightly
@one_case
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases() if "check" in case.where])
def test_self_check_passes_at_gpu_size(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case.start("", prepare=_as_on_a_gpu)
    assert "self-check passed" in capfd.readouterr().out
