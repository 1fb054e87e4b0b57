"""Fine-tuning data and its tokenizer: words are numbers, tokens are the same numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES, WORDS = 24, 127


def write(folder: Path) -> Path:
    """Write the tokenizer and examples of 9 to 40 tokens, about half of them the masked prompt; returns the folder."""
    tokenizer().save_pretrained(folder)
    random.seed(5)
    lines = []
    for _ in range(EXAMPLES):
        prompt, answer = (" ".join(str(random.randrange(1, 120)) for _ in range(random.randint(4, 20))) for _ in "pa")
        lines.append(json.dumps({"input": prompt, "output": answer}))
    folder.joinpath("training.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tokenizer() -> Any:
    """A transformers tokenizer of ``WORDS`` numbers and an end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(WORDS)} | {"<end>": WORDS}
    by_word = Tokenizer(models.WordLevel(words, unk_token="0"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="<end>", pad_token="<end>")


def finetuning(folder: Path, *, packed: int = 0, pad_each_to: int = 1) -> Callable[[Any], None]:
    """A function that puts Bridge's fine-tuning dataset into a config.

    packed: the tokens of a pack; 0: an example is a sequence.
    pad_each_to: the multiple to which every example of a pack is padded.
    """

    def change(config: Any) -> None:
        from megatron.bridge.data.builders import GPTSFTDatasetConfig
        from megatron.bridge.data.packing import PackedSequenceSpecs
        from megatron.bridge.training.config import TokenizerConfig

        specs = PackedSequenceSpecs(packed_sequence_size=packed, pad_seq_to_mult=pad_each_to, num_tokenizer_workers=1)
        config.dataset = GPTSFTDatasetConfig(
            seq_length=config.model.seq_length,
            dataset_root=folder,
            enable_offline_packing=packed > 0,
            offline_packing_specs=specs if packed else None,
            dataset_kwargs=None if packed else {"pad_to_max_length": True},
            do_validation=False,
            do_test=False,
            num_workers=0,
        )
        config.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
        if packed:
            config.train.micro_batch_size = 1

    return change
