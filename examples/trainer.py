"""transformers' own ``Trainer`` with sequences sharded over ranks, compared with the same ``Trainer`` on one rank.

    python examples/trainer.py                                  a small Llama on four processes of this host
    torchrun --nproc-per-node 4 examples/trainer.py             on GPUs, if there are as many
    python examples/trainer.py --model Qwen/Qwen3-0.6B --bf16   a model of yours: rows are its tokenizer's

Four lines differ from data parallelism: the group, ``ContextParallel``, ``apply``, and the collator, which marks the
rows that Trainer gives each rank: the model exchanges them. The evaluation's last batch is not full.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.ranks import is_under_torchrun, join

TOLERANCE = 1e-5
"""Largest relative difference of two losses: float32 rounding, summed in another order."""


def model_of(args: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1234)
    if args.model != "llama":
        return AutoModelForCausalLM.from_pretrained(args.model)
    small = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2))


def rows_of(args: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Rows of ``--seq-length`` tokens of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "\n".join(file.read_text(errors="replace") for file in files)
    if args.model == "llama":
        tokens = list(text.encode())
    else:
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    n = args.seq_length
    return [{"input_ids": tokens[i * n : (i + 1) * n]} for i in range(args.rows)]


def train(args: argparse.Namespace, cp: ContextParallel, rows: int) -> list[float]:
    """The losses that Trainer logs: of each step, and of the evaluation at the end.

    rows: per device, of a micro-batch.
    """
    from transformers import Trainer, TrainingArguments

    model, data = model_of(args), rows_of(args)
    huggingface.apply(model, cp)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=rows,
            gradient_accumulation_steps=2,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data[rows * cp.size + 1 :],
        eval_dataset=data[: rows * cp.size + 1],
        data_collator=huggingface.Collator(cp),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def alone(args: argparse.Namespace) -> list[float]:
    """Train on one rank, with as many rows in a batch."""
    return train(args, ContextParallel("ring"), args.ranks)


def main(args: argparse.Namespace) -> None:
    args.device = join("cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu")
    cp = ContextParallel(args.provider, group=dist.group.WORLD)
    losses = train(args, cp, 1)
    if cp.index == 0:
        print("losses of", cp.size, "ranks:", " ".join(f"{loss:.6f}" for loss in losses), flush=True)
    if args.result is not None and cp.index == 0:
        torch.save(losses, args.result)
    dist.destroy_process_group()


def compared(args: argparse.Namespace) -> None:
    """Fork the ranks, then one; AssertionError for differences beyond rounding."""
    args.result = Path(tempfile.mkdtemp()) / "losses"
    run_ranks(main, args.ranks, args=(args,), timeout=None)
    many = torch.load(args.result)
    one = run_ranks(alone, 1, args=(args,), timeout=None)[0]
    worst = max(abs(a - b) / b for a, b in zip(many, one, strict=True))
    print(f"{args.ranks} ranks equal one within {worst:.1e} over {args.steps} steps and an evaluation")
    assert worst <= (0.02 if args.bf16 else TOLERANCE), (many, one)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="transformers' Trainer with sequences sharded over ranks.")
    parser.add_argument("--model", default="llama", help="llama (a small one), or a name or directory")
    parser.add_argument("--provider", default="striped", help="of cp-plugin (striped)")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="of the data set (64)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="Trainer's bf16: autocast")
    parser.add_argument("--ranks", type=int, default=4, help="to fork, where torchrun did not start them (4)")
    args = parser.parse_args()
    args.result = None
    return args


if __name__ == "__main__":
    chosen = arguments()
    main(chosen) if is_under_torchrun() else compared(chosen)
