"""Multi-token prediction as Megatron-LM's dev branch has it: ``roll_tensor`` takes several tensors and returns no sums,
and ``process_mtp_loss`` counts tokens by the sum of the mask. Stand-ins with these signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

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
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., tuple[Tensor, None]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    input_ids: Tensor | None = None,
) -> Tensor:
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
        loss = loss_mask * compute_language_model_loss(labels, output_layer(states)[0]) / count
        hidden = mtp.MTPLossAutoScaler.apply(hidden, loss * first if config.calculate_per_token_loss else loss)
    return hidden


@pytest.fixture
def of_dev(adapter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_token_prediction

    monkeypatch.setattr(multi_token_prediction, "roll_tensor", _roll_several)


def test_both_contracts_hold(of_dev: None) -> None:
    from cp_plugin.megatron.patches import mtp, probes
    from cp_plugin.megatron.patches.table import PROVIDER

    for function, make, probe in (
        (_roll_several, mtp.replace_roll_tensor, probes.roll),
        (_loss, mtp.replace_process_mtp_loss, probes.mtp_loss),
    ):
        (patch,) = [patch for patch in PROVIDER if patch.make is make]
        assert patch.contract.probe is probe
        assert patch.contract.broken(function, make(function)) is None


def test_a_loss_that_counts_its_own_tokens_is_found(of_dev: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron.patches import mtp, probes

    monkeypatch.setattr(mtp, "_counted", lambda mask, count, following: mask)
    assert "gradients of the predicted tokens" in probes.mtp_loss(_loss, mtp.replace_process_mtp_loss(_loss))


def test_several_tensors_are_rolled_at_once_and_filled() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_plugin.megatron.patches import mtp, stock

    roll, tokens = mtp.replace_roll_tensor(_roll_several), torch.arange(16).unsqueeze(0)
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    order = [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]  # rank 0's tokens, then rank 1's
    for packed in (None, pack):
        given = {"packed_seq_params": packed, "fill_values": [0, True]}
        want = [x[:, order] for x in roll([tokens, tokens > 8], cp_group=stock.Group(), **given)]

        def on_rank(group: Any, given: dict[str, Any] = given) -> list[Tensor]:
            mine = tokens[:, order].chunk(2, 1)[group.rank()]
            return roll([mine, mine > 8], cp_group=group, **given)

        got = [torch.cat(parts, 1) for parts in zip(*stock.on_ranks(on_rank, 2), strict=True)]
        assert [x.dtype for x in got] == [torch.int64, torch.bool]
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
