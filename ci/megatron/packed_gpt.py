"""``stock_gpt.py`` on packed documents, for Megatrons without a flag for them.

Batches are sliced as this Megatron's pretrain_gpt.py slices packs: by ``get_thd_batch_on_this_cp_rank`` where there is
one, otherwise by ``get_batch_on_this_cp_rank``.
"""

import inspect
import runpy
from functools import partial
from pathlib import Path

import torch
from megatron.core import mpu, utils
from megatron.core.packed_seq_params import PackedSeqParams

stock = runpy.run_path(str(Path(__file__).with_name("stock_gpt.py")), run_name="stock_gpt")
PARTS = (0.3, 0.45, 1.0)
"""Where the documents of a pack end, in parts of its tokens."""


def forward_step(batches, gpt):
    batch = {name: x.cuda() for name, x in next(batches).items()}
    tokens = batch["tokens"].size(1)
    ends = [0, *(int(part * tokens) for part in PARTS)]
    bounds = torch.tensor(ends, dtype=torch.int32, device=batch["tokens"].device)
    longest = bounds.diff().max().view(1)
    by_document = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if by_document is not None:
        batch, packed = by_document(batch, bounds, bounds, longest)
    else:
        slicer = utils.get_batch_on_this_cp_rank
        offered = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
        batch = {**dict.fromkeys(("attention_mask", "cu_seqlens_padded", "local_cp_size")), **batch}
        batch |= {"cu_seqlens": bounds.unsqueeze(0), "max_seqlen": longest}
        known = inspect.signature(slicer).parameters
        batch = slicer(batch, **{name: x for name, x in offered.items() if name in known})
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=int(longest),
            max_seqlen_kv=int(longest),
        )
    output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
    return output, partial(stock["loss"], batch["loss_mask"])


if __name__ == "__main__":
    stock["train"](forward_step)
