"""Write on from a prompt with the model that the command line describes, and show the text."""

from __future__ import annotations

import time

import torch
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from rich.console import Console

from cp_plugin.megatron import decoding, gpt


def write(prompt: str, new_tokens: int, *, as_bytes: bool) -> None:
    """Load the model, generate, and print on rank 0.

    Args:
        as_bytes: tokens are the bytes of the text, instead of those of the model's tokenizer.

    Raises:
        ValueError: as ``gpt.load`` and ``decoding.decoding`` do.
    """
    (model,) = gpt.load()
    tokenizer = None if as_bytes else build_tokenizer(get_args())
    tokens = list(prompt.encode()) if tokenizer is None else tokenizer.tokenize(prompt)
    device = next(model.parameters()).device
    start = time.perf_counter()
    found = decoding.generate(model.eval(), torch.tensor([tokens], device=device), new_tokens)[0].tolist()
    seconds = time.perf_counter() - start
    if torch.distributed.get_rank() == 0:
        console = Console(soft_wrap=True)
        console.print(_text(found) if tokenizer is None else tokenizer.detokenize(found), markup=False, highlight=False)
        console.print(f"{new_tokens} tokens in {seconds:.1f} s", style="dim", highlight=False)


def _text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
