"""Causal attention over a sequence sharded over four ranks, compared with one device: plain torch and the facade.

torchrun --nproc-per-node 4 examples/torch_attention.py
python examples/torch_attention.py                          # forks four ranks itself
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cp_plugin
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.ranks import is_under_torchrun, join

TOKENS, BATCH, HEADS, KV_HEADS, SIZE = 2048, 2, 8, 2, 64


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE: rotate x ``[s, b, heads, d]`` by its tokens' global positions ``[s]``."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, x.size(-1) // 2, device=x.device)
    angles = positions.to(x.device)[:, None, None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


def main() -> None:
    device = join("cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu")
    torch.manual_seed(0)  # every rank has the whole sequence, for comparison
    whole = [torch.randn(TOKENS, BATCH, heads, SIZE, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    cp = cp_plugin.ContextParallel("striped", group=dist.group.WORLD)
    q, k, v = (cp.shard(x).requires_grad_() for x in whole)  # this rank's tokens
    own = cp.positions(TOKENS)
    out = cp.attention(rotate(q, own), rotate(k, own), v, causal=True)
    out.square().sum().backward()
    sent = {phase: cp.mesh.ledger.bytes(phase=phase) for phase in ("forward", "backward")}
    got = [cp.unshard(x.detach()) for x in (out, q.grad, k.grad, v.grad)]

    q, k, v = (x.requires_grad_() for x in whole)  # the same on one device; torch wants [b, heads, s, d]
    all_of_them = torch.arange(TOKENS)
    one = [x.permute(1, 2, 0, 3) for x in (rotate(q, all_of_them), rotate(k, all_of_them), v)]
    out = scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    out.square().sum().backward()
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, (out, q.grad, k.grad, v.grad), strict=True)]
    if cp.index == 0:
        print(f"{cp.size} ranks on {device.type}, {TOKENS} tokens, {len(own)} on each; bytes sent by rank 0: {sent}")
        print("relative error of output, dq, dk, dv: " + ", ".join(f"{error:.1e}" for error in errors))
    dist.destroy_process_group()
    assert max(errors) < 1e-5, f"not the attention of one device: {errors}"


if __name__ == "__main__":
    main() if is_under_torchrun() else run_ranks(main, 4)
