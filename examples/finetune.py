"""Fine-tune a language model with sequences sharded over ranks, and compare every loss with one rank's.

    python examples/finetune.py                    a small decoder in plain torch; four ranks are forked here
    python examples/finetune.py --model llama      a small Llama of Hugging Face transformers, random weights
    torchrun --nproc-per-node 8 examples/finetune.py --model DIRECTORY --seq-length 131072 --no-reference

DIRECTORY was written by transformers' ``save_pretrained``: a causal language model and its tokenizer. The text is
Python's standard library, or --text FILE.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch_attention import rotate
from trainer import TOLERANCE, model_of

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.ranks import is_under_torchrun, join


class Decoder(nn.Module):
    """A decoder in plain torch. Context parallelism changes its positions and its attention only."""

    def __init__(self, cp: ContextParallel | None, size: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.cp, self.heads = cp, heads
        self.embedding = nn.Embedding(256, size)
        self.qkv = nn.ModuleList(nn.Sequential(nn.RMSNorm(size), nn.Linear(size, 3 * size)) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.RMSNorm(size), nn.Linear(size, 256))

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels ``[s, b]``, positions ``[s]`` -> the sum of the tokens' losses."""
        x = self.embedding(tokens)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)
            x = x + self.attention(rotate(q, positions), rotate(k, positions), v).flatten(2)
            x = x + mlp(x)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[s, b, heads, d]`` of this rank's tokens or, without context parallelism, of all."""
        if self.cp is not None:
            return self.cp.attention(q, k, v, causal=True)
        whole = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return scaled_dot_product_attention(*whole, is_causal=True).permute(2, 0, 1, 3)


def build(args: argparse.Namespace, cp: ContextParallel | None) -> nn.Module:
    """The decoder above, or a causal language model of Hugging Face transformers."""
    if args.model == "torch":
        return Decoder(cp)
    model = model_of(args).to(args.device, getattr(torch, args.dtype))
    if cp is not None:
        huggingface.apply(model, cp)
    return model


def plain_loss(model: nn.Module, cp: ContextParallel | None, batch: Tensor) -> Tensor:
    """This rank's share of the decoder's mean loss of a batch ``[b, s]``, which is the same on all ranks."""
    tokens, labels = batch.t(), pad(batch[:, 1:], (0, 1), value=-100).t()  # shifted over the whole sequence
    positions = torch.arange(len(tokens))
    if cp is not None:
        tokens, labels, positions = cp.shard(tokens), cp.shard(labels), cp.positions(len(tokens))
    return model(tokens, positions, labels) / batch[:, 1:].numel()


def transformers_loss(model: nn.Module, cp: ContextParallel | None, batch: Tensor) -> Tensor:
    """Return the same for a model of transformers."""
    inputs = {"input_ids": batch, "labels": batch} if cp is None else huggingface.shard(cp, batch)
    return model(**inputs, use_cache=False).loss


def train(args: argparse.Namespace, batches: Tensor, cp: ContextParallel | None) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(1234)
    model = build(args, cp).to(args.device, getattr(torch, args.dtype)).train()
    share_of_loss = plain_loss if args.model == "torch" else transformers_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ranks = 1 if cp is None else cp.size
    divided = model if cp is None else DistributedDataParallel(model)
    losses = []
    for batch in batches.to(args.device):
        loss = share_of_loss(divided, cp, batch)
        (loss * ranks).backward()  # DistributedDataParallel averages the ranks' gradients; we need their sum
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if cp is not None:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def read(args: argparse.Namespace) -> Tensor:
    """Token ids ``[steps, b, s]``, the same on every rank: bytes, or by the model's tokenizer."""
    files = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(errors="replace") for file in files)
    needed = args.steps * args.batch * args.seq_length
    if args.model in ("torch", "llama"):
        tokens = list(text.encode()[:needed])
    else:
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(args.model)(text[: 16 * needed])["input_ids"][:needed]
    if len(tokens) < needed:
        steps = len(tokens) // (args.batch * args.seq_length)
        raise ValueError(f"the text has {len(tokens)} tokens, enough for {steps} steps: give a longer one, or --steps")
    return torch.tensor(tokens).view(args.steps, args.batch, args.seq_length)


def main(args: argparse.Namespace) -> None:
    args.device = join("cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu")
    batches = read(args)
    cp = ContextParallel(args.provider, group=dist.group.WORLD)
    many = train(args, batches, cp)
    dist.destroy_process_group()
    if cp.index == 0:
        report(args, cp.size, many, train(args, batches, None) if args.reference else None)


def report(args: argparse.Namespace, ranks: int, many: list[float], one: list[float] | None) -> None:
    """Print the losses; AssertionError for differences beyond rounding."""
    worst = max((abs(a - b) / b for a, b in zip(many, one or many, strict=True)))
    table = Table("step", f"loss, {ranks} ranks", "loss, 1 rank" if one else "", title=f"{args.model}, {args.provider}")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 5)), args.steps - 1}):
        table.add_row(str(step + 1), f"{many[step]:.6f}", f"{one[step]:.6f}" if one else "")
    Console().print(table)
    if one is not None:
        print(f"{ranks} ranks equal one within {worst:.1e} (allowed {TOLERANCE:g}) over {args.steps} steps")
        assert worst <= TOLERANCE, worst


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with sequences sharded over ranks.")
    parser.add_argument("--model", default="torch", help="torch, llama, or a directory of transformers (torch)")
    parser.add_argument("--provider", default="striped", help="of cp-plugin (striped)")
    parser.add_argument("--text", type=Path, help="a file (default: Python's standard library)")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=4, help="to fork, where torchrun did not start them (4)")
    parser.add_argument(
        "--no-reference", dest="reference", action="store_false", help="do not train on one rank as well"
    )
    args = parser.parse_args()
    if args.model != "torch" and find_spec("transformers") is None:
        parser.error(f"--model {args.model} needs transformers: pip install 'cp-plugin[huggingface]', or --model torch")
    if args.dtype != "float32" and args.reference:
        parser.error(f"--dtype {args.dtype}: losses are compared in float32 only: add --no-reference")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text {args.text}: no such file")
    for name in ("seq_length", "batch", "steps", "ranks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    return args


if __name__ == "__main__":
    chosen = arguments()
    main(chosen) if is_under_torchrun() else run_ranks(main, chosen.ranks, args=(chosen,), timeout=None)
