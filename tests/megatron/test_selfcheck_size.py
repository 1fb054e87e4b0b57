"""What the self-check costs, and leaves as it is: batch sizes, memory, settings that a pass would disturb."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from nightly import nightly, one_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import train

from cp_plugin.core.layout import LAYOUTS
from cp_plugin.megatron.selfcheck import attention_pass
from cp_plugin.megatron.selfcheck.first_batch import tokens_for
from cp_plugin.placement.documents import get_layout
from cp_plugin.testing import oracle

pytestmark = pytest.mark.usefixtures("adapter")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("size", "chunk"), [(1, 128), (2, 128), (3, 128), (16, 128), (24, 80), (64, 32), (512, 16)])
def test_gpu_ranks_have_two_chunks_of_up_to_128_tokens(name: str, size: int, chunk: int) -> None:
    layout = get_layout(name)
    tokens = tokens_for(layout, size, cuda=True)
    assert tokens == 2 * chunk * size
    for index in range(size):
        assert all(len(segment) % chunk == 0 for segment in layout.segments(tokens, size, index))


@pytest.mark.parametrize(("name", "size", "tokens"), [("zigzag", 2, 32), ("zigzag", 64, 128), ("striped", 3, 33)])
def test_cpu_ranks_have_few_tokens(name: str, size: int, tokens: int) -> None:
    assert tokens_for(get_layout(name), size, cuda=False) == tokens


@contextmanager
def _largest() -> Iterator[list[int]]:
    """Elements of the largest tensor created inside."""
    found = [0]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                found[0] = max(found[0], result.numel())
            return result

    with Watching():
        yield found


def test_reference_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results without a tensor beyond the limit."""
    from test_linear_module import _module, _start

    from cp_plugin.megatron.layers.core_attention import CoreAttention

    _start("basic", "LN")
    module = _module(layer=2, kind=CoreAttention)
    tokens, mine = 256, torch.arange(0, 256, 2)
    generator = torch.Generator().manual_seed(3)
    heads, groups, size = module.config.num_attention_heads, module.config.num_query_groups, module.head_dim
    whole = [torch.randn(tokens, 2, n, size, generator=generator) for n in (heads, groups, groups, heads)]
    at_once = attention_pass.softmax_reference(module, mine)(*whole)
    limit = 1 << 15
    monkeypatch.setattr(oracle, "ELEMENTS", limit)
    with _largest() as largest:
        in_parts = attention_pass.softmax_reference(module, mine)(*whole)
    for a, b in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(a, b)
    inputs = max(x.numel() for x in whole)
    assert largest[0] <= max(limit, inputs) < tokens * tokens * 2


DRAWN = ("--moe-router-force-load-balancing", "--moe-input-jitter-eps 1e-2 --init-method-std 0.2")


@pytest.mark.parametrize("flags", DRAWN)
def test_routers_that_draw_are_compared_without_drawing(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"--num-experts 4 {flags} --context-parallel-size 2 --cp-provider ring --cp-layout zigzag")
    assert capfd.readouterr().out.count("self-check passed: a step") == 1


SIZES = (
    "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2 --bf16",
    "--context-parallel-size 2 --cp-provider ring --dataloader-inter-document-masking",
    "--context-parallel-size 2 --cp-linear-attention gla --bf16",
    "--context-parallel-size 2 --cp-linear-attention rebased",
)


def _as_on_a_gpu() -> None:
    from cp_plugin.megatron.selfcheck import first_batch as selfcheck

    small = selfcheck.tokens_for
    selfcheck.tokens_for = lambda layout, size, *, cuda: small(layout, size, cuda=True)


@nightly
@one_case
@pytest.mark.parametrize("flags", SIZES)
def test_self_check_passes_at_gpu_size(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(int(flags.split()[1]), flags, prepare=_as_on_a_gpu)
    assert "self-check passed" in capfd.readouterr().out
