"""Multi-token prediction as Megatron-LM's dev branch has it: ``roll_tensor`` takes several tensors and returns no sums,
and ``process_mtp_loss`` counts tokens by the sum of the mask. Stand-ins with these signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_packed_places import pack_of, padded_pack
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm.threads import run_threads

pytestmark = pytest.mark.usefixtures("adapter")


def _roll_several(
    tensors: Sequence[Tensor],
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    fill_values: Sequence[float] | None = None,
    roll_context: Any = None,
    sequence_fields: Sequence[str] | None = None,
    roll_depth: int = 0,
) -> list[Tensor]:
    """On one rank."""
    rolled = [x.roll(shifts, dims) for x in tensors]
    ends = [-1] if packed_seq_params is None else (packed_seq_params.cu_seqlens_q[1:] - 1).tolist()
    for x, fill in zip(rolled, fill_values or [0] * len(rolled), strict=True):
        x[..., ends] = fill
    return rolled


def _loss(
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    config: Any,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    input_ids: Tensor | None = None,
) -> Tensor:
    """Without the output layer: a token's state is its loss, in units of its label."""
    from megatron.core.transformer import multi_token_prediction as mtp

    hidden, *predicted = hidden_states.chunk(1 + config.mtp_num_layers)
    first = loss_mask.sum()
    for depth, states in enumerate(predicted):
        labels, loss_mask = mtp.roll_tensor(
            [labels, loss_mask],
            cp_group=cp_group,
            packed_seq_params=packed_seq_params,
            sequence_fields=["labels", "loss_mask"],
            roll_depth=depth,
        )
        count = loss_mask.sum().clamp(min=1)
        loss = loss_mask * labels * states[..., 0].transpose(0, 1) / count
        hidden = mtp.MTPLossAutoScaler.apply(hidden, loss * first if config.calculate_per_token_loss else loss)
    return hidden


def group_of(cp: ContextParallel) -> SimpleNamespace:
    """Stands in for a process group."""
    return SimpleNamespace(cp=cp, rank=lambda: cp.mesh.index, size=lambda: cp.size)


ALONE = group_of(ContextParallel("ring"))


def run_two_ranks(call: Callable[[Any], Any]) -> list[Any]:
    return run_threads(lambda mesh: call(group_of(ContextParallel("ring", mesh=mesh, layout="zigzag"))), {"cp": 2})


@pytest.fixture
def roll(adapter: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The replaced function, in Megatron's module, too."""
    from megatron.core.transformer import multi_token_prediction

    from cp_plugin.megatron.patches import mtp

    replaced = mtp.replace_roll_tensor(_roll_several)
    monkeypatch.setattr(mtp.runtime, "context_parallel", lambda group: group.cp)
    monkeypatch.setattr(multi_token_prediction, "roll_tensor", replaced)
    return replaced


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_of_two_ranks_are_those_of_one(roll: Callable[..., Any], per_token: bool) -> None:
    """Averaged, or summed, as Megatron does."""
    from cp_plugin.megatron.patches import mtp

    labels, mask = torch.arange(1, 17).unsqueeze(0), torch.ones(1, 16)
    mask[:, 2:5] = 0  # unevenly on the ranks
    hidden = torch.randn(3, 16, 1, 1, generator=torch.Generator().manual_seed(0))
    config = SimpleNamespace(mtp_num_layers=2, calculate_per_token_loss=per_token)

    def gradient(group: Any) -> Tensor:
        leaf = torch.cat([group.cp.shard(part, 0) for part in hidden]).requires_grad_()
        shards = (group.cp.shard(x, 1) for x in (labels, mask))
        out = mtp.replace_process_mtp_loss(_loss)(leaf, *shards, config, cp_group=group)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        return grad.view(3, -1)[1:]  # the main loss's own is on every rank

    want = gradient(ALONE)
    for number, got in enumerate(run_two_ranks(gradient)):
        rows = want.unflatten(1, (4, 4))[:, [number, 3 - number]].flatten(1)
        torch.testing.assert_close(got / (1 if per_token else 2), rows)


def test_several_tensors_are_rolled_at_once_and_filled(roll: Callable[..., Any]) -> None:
    tokens = torch.arange(16).unsqueeze(0)
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    for packed in (None, pack_of(ends, ends)):

        def rolled(group: Any, packed: Any = packed) -> list[Tensor]:
            shard = group.cp.shard(tokens, 1)
            return roll([shard, shard > 8], cp_group=group, packed_seq_params=packed, fill_values=[0, True])

        want = rolled(ALONE)
        for number, got in enumerate(run_two_ranks(rolled)):
            assert [x.dtype for x in got] == [torch.int64, torch.bool]
            rows = [x.unflatten(1, (4, 4))[:, [number, 3 - number]].flatten(1) for x in want]
            assert all(torch.equal(x, y) for x, y in zip(got, rows, strict=True))


def test_next_tokens_of_padded_documents() -> None:
    from cp_plugin.megatron.patches import mtp

    tokens = torch.arange(100, 124).view(1, 24)
    following = mtp._rolled(ContextParallel("striped"), tokens, -1, 1, padded_pack())[0].tolist()
    assert following[:5] == [101, 102, 103, 104, 0] and following[8:15] == [109, 110, 111, 112, 113, 114, 0]
