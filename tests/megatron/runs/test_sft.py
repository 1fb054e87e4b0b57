"""Fine-tuning on conversations (``--sft``) with a checkout's unmodified scripts: one rank's numbers.

    PYTHONPATH=path/to/Megatron-LM ci/huggingface.sh tests/megatron/runs/test_sft.py

Megatron's SFT dataset packs the conversations of a line, and masks everything but the assistant's turns. With context
parallelism it pads each conversation to a multiple of twice the number of ranks; padding is masked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import training
from test_checkout import IN_A_CHECKOUT, SCRIPTS, TENSOR, run_script
from training import MODEL, Record, compare

WANTED = ("transformers", "datasets")
MISSING = [name for name in WANTED if find_spec(name) is None]
pytestmark = [
    *IN_A_CHECKOUT,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (ci/huggingface.sh)"),
]
TOKENS = 256
LONG = MODEL.replace("--seq-length 64 --max-position-embeddings 64", f"--seq-length {TOKENS}")
LONG += f" --max-position-embeddings {TOKENS}"


class Case(NamedTuple):
    ranks: int
    """Without context parallelism, for the flags."""
    flags: str
    size: int
    """Of context parallelism."""
    provider: str


PREDICTED = "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --micro-batch-size 1"
CASES = {
    "CP 4": Case(1, "", 4, "striped"),
    "TP 2 x CP 2": Case(2, TENSOR, 2, "attention2d --cp-layout zigzag"),
    "PP 2 x CP 2, prediction": Case(2, PREDICTED, 2, "ring --cp-layout contiguous"),
}
SPECIAL = ["<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>", "<|end|>", "<|pad|>"]
"""Those of Megatron's own prompt formats, and two of the template below."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


def _topics() -> list[str]:
    """Short paragraphs from Python's documentation topics."""
    import pydoc_data.topics

    parts = [part for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n")]
    return [" ".join(part.split())[:90] for part in parts if len(part) > 40]


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags for a tokenizer with a chat template, and for lines of one to three conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder, texts = tmp_path_factory.mktemp("conversations"), _topics()
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder / "tokenizer")
    with (folder / "conversations.jsonl").open("w") as file:
        for line in range(64):
            messages = []
            for text in texts[3 * line : 3 * line + 1 + line % 3]:
                question, answer = text[: len(text) // 3], text[len(text) // 3 :]
                messages.append({"role": "system", "content": "Python"})
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")
    return (
        f"--sft --no-create-attention-mask-in-dataloader --num-workers 0 --split 100,0,0 "
        f"--data-path {folder / 'conversations.jsonl'} "
        f"--tokenizer-type SFTTokenizer --tokenizer-model {folder / 'tokenizer'}"
    )


@pytest.fixture
def train(conversations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Record]]:
    """``train(script, ranks, flags)``: two steps on these conversations."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(training, "DATA", conversations)
    return functools.partial(run_script, monkeypatch, model=LONG, steps=2)


@pytest.mark.parametrize(
    ("script", "case"),
    [(script, case) for script in SCRIPTS for case in CASES if script == "pretrain_gpt.py" or "PP" not in case],
)
def test_numbers_are_those_of_one_rank(script: str, case: str, train: Callable[..., list[Record]]) -> None:
    """In Megatron's own prompt format, in which a conversation begins with masked tokens."""
    ranks, flags, size, provider = CASES[case]
    want = train(script, ranks, flags)
    flags += f" --context-parallel-size {size} --cp-provider {provider}"
    compare(train(script, size * ranks, flags), want, steps=2)


def _padded_for_four_ranks() -> None:
    """As the dataset does it with context parallelism."""
    from megatron.training.datasets.sft_dataset import SFTDataset

    get = SFTDataset.__getitem__

    def padded(self: Any, index: int) -> dict[str, Any]:
        self.config.context_parallel_size = 4
        return get(self, index)

    SFTDataset.__getitem__ = padded


def test_the_template_of_the_tokenizer(train: Callable[..., list[Record]]) -> None:
    """No token is masked: a conversation's last one predicts the next conversation's first, or padding."""
    flags = "--sft-tokenizer-prompt-format default"
    got = train("pretrain_gpt.py", 4, f"{flags} --context-parallel-size 4 --cp-provider striped")
    compare(got, train("pretrain_gpt.py", 1, flags, prepare=_padded_for_four_ranks), steps=2)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(got, train("pretrain_gpt.py", 1, flags), steps=2)
