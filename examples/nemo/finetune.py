"""Fine-tune a Hugging Face model, or LoRA adapters, by Megatron Bridge with context-parallel attention of cp_plugin.

python examples/nemo/finetune.py --make tiny   # a random model, a tokenizer and examples
python examples/nemo/finetune.py --nproc 2 --small --model tiny --data tiny --steps 3 --context-parallel-size 2 \
    --provider striped                           # CPU ranks
torchrun --nproc-per-node 8 examples/nemo/finetune.py --model Llama-3.2-1B --data examples --packed \
    --lora 16 --seq-length 8192 --context-parallel-size 8 --provider ring --layout zigzag
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from cp_plugin import nemo
from cp_plugin.testing.launch import main_with_nproc

WORDS, LENGTH = 1023, 128


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write a tiny random model and examples, then exit")
    parser.add_argument("--model", help="folder with a model and a tokenizer of Hugging Face")
    parser.add_argument("--data", help='folder of training.jsonl, one {"input": ..., "output": ...} a line')
    parser.add_argument("--packed", action="store_true", help="pack examples into sequences of --seq-length")
    parser.add_argument("--lora", type=int, metavar="DIM", help="train adapters of this rank instead of the model")
    parser.add_argument("--provider", default="upstream", help="as --cp-provider; default: unmodified Bridge")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--grid", help="rows x columns of attention2d")
    parser.add_argument("--layout")
    parser.add_argument("--seq-length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="in float32, in batches of 4, without checkpoints")
    return parser.parse_args(words)


def recipe(args: argparse.Namespace) -> Any:
    """Bridge's plain recipe for the model, its tokenizer and the examples."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.data.builders import GPTSFTDatasetConfig
    from megatron.bridge.data.packing import PackedSequenceSpecs
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.config import TokenizerConfig

    config = vanilla_gpt_pretrain_config()
    config.model = AutoBridge.from_hf_pretrained(args.model).to_megatron_provider(load_weights=False)
    config.checkpoint.pretrained_checkpoint = args.model
    config.model.attention_dropout = 0.0
    config.model.calculate_per_token_loss, config.ddp.average_in_collective = True, False  # as with context parallelism
    config.model.seq_length, config.model.context_parallel_size = args.seq_length, args.context_parallel_size
    config.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=args.model)
    config.dataset = GPTSFTDatasetConfig(
        seq_length=args.seq_length,
        dataset_root=args.data,
        enable_offline_packing=args.packed,
        offline_packing_specs=PackedSequenceSpecs(packed_sequence_size=args.seq_length) if args.packed else None,
        dataset_kwargs={"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        num_workers=0,
    )
    if args.lora is not None:
        config.peft = LoRA(dim=args.lora, alpha=2 * args.lora)
    config.train.train_iters, config.train.micro_batch_size = args.steps, 1
    config.validation.eval_iters = config.scheduler.lr_warmup_iters = 0
    if args.small:
        config.mixed_precision = None
        config.train.global_batch_size, config.logger.log_interval = 4, 1
        config.checkpoint.save = config.logger.tensorboard_dir = None
    return config


def make(folder: Path) -> None:
    """A random Llama of two narrow layers, a tokenizer whose words are numbers, and examples of 20 to 60 of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=WORDS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)} | {"<end>": WORDS}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    with (folder / "training.jsonl").open("w") as file:
        for _ in range(24):
            texts = (" ".join(random.choices(list(map(str, range(WORDS))), k=random.randint(10, 30))) for _ in "io")
            file.write(json.dumps(dict(zip(("input", "output"), texts, strict=True))) + "\n")


def train(words: list[str]) -> None:
    """Train as one rank."""
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    args = options(words)
    if args.make is not None:
        return make(args.make)
    config = recipe(args)
    nemo.apply(config, provider=args.provider, grid=args.grid, layout=args.layout)
    finetune(config, forward_step)


if __name__ == "__main__":
    sys.exit(main_with_nproc(sys.argv[1:], train, preload=nemo.activate))
