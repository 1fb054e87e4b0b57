"""Text generation: a checkpoint's model without optimizer or data, prompts, texts streamed token by token."""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, checkpointing, get_args, initialize, training
from torch import Tensor

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.common.text import ranks_named
from cp_plugin.engine.core.options import whole_number
from cp_plugin.engine.inference.request import Report, Request, Sampler
from cp_plugin.megatron import runtime
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags.args import peek
from cp_plugin.megatron.inference import decoding, saved_model
from cp_plugin.megatron.models import gpt
from cp_plugin.megatron.models.indexed import EOD
from cp_plugin.megatron.selfcheck import audit


class Tokens:
    """Text to tokens and back."""

    def __init__(self, as_bytes: bool) -> None:
        self._tokenizer: Any = None if as_bytes else build_tokenizer(get_args())

    @property
    def end(self) -> int | None:
        """The token that ends a document, if there is one."""
        return EOD if self._tokenizer is None else getattr(self._tokenizer, "eod", None)

    def encode(self, text: str) -> list[int]:
        """ValueError for text that the tokenizer cannot encode."""
        if self._tokenizer is None:
            return list(text.encode())
        try:
            return list(self._tokenizer.tokenize(text))
        except ValueError as error:
            raise ValueError(
                f"--prompt: {get_args().tokenizer_type} cannot encode it ({error}): if tokens are the bytes of the "
                "text, add --bytes"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        return str(self._tokenizer.detokenize(list(tokens)))

    @property
    def ids(self) -> int:
        """Number of token ids; the model's embedding may be padded."""
        padded = int(get_args().padded_vocab_size)
        if self._tokenizer is None:
            return min(EOD + 1, padded)
        return min(int(getattr(self._tokenizer, "vocab_size", padded)), padded)


def encode(request: Request, tokens: Tokens) -> list[list[int]]:
    """Token ids of the prompts; ValueError for an empty prompt, or ids outside the model's vocabulary."""
    encoded = []
    for prompt in request.prompts:
        ids = tokens.encode(prompt)
        if not ids:
            raise ValueError(f"--prompt {prompt!r} has no tokens: write at least one")
        known = get_args().padded_vocab_size
        strange = sorted({token for token in ids if not 0 <= token < known})
        if strange:
            raise ValueError(
                f"--prompt: token ids {strange[:5]} are not in the model's vocabulary of {known}: "
                "choose the model's tokenizer (--tokenizer-type, --tokenizer-model, or --bytes)"
            )
        encoded.append(ids)
    return encoded


def require_agreement(request: Request, prompts: list[list[int]]) -> None:
    """ValueError on every rank if their requests differ."""
    everywhere = gather_objects((request, prompts))
    others = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
    if others:
        raise ValueError(
            f"the ranks disagree on the request: {ranks_named(others)} got a different --prompt or different options "
            "from rank 0"
        )


def write(
    model: torch.nn.Module, prompts: list[list[int]], request: Request, tokens: Tokens
) -> Iterator[list[int] | Report]:
    """Yields each step's token of every text (-1 after the end of one), and last a ``Report``.

    Raises:
        ValueError: as ``decoding.decoding`` does.
    """
    device = next(model.parameters()).device
    lengths = [len(ids) for ids in prompts]
    batch = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, ids in zip(batch, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    sampler = Sampler(request.sampling)

    def choose(logits: Tensor) -> Tensor:
        """The next token of each text; rank 0 chooses and broadcasts it."""
        chosen = sampler.choose(logits[:, : tokens.ids].float()).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(chosen, 0)
        return chosen

    texts, over = [list(ids) for ids in prompts], [False] * len(prompts)
    context = max(lengths) + request.new_tokens
    with (
        torch.inference_mode(),
        decoding.decoding(model, batch=len(prompts), context=context, fp8=request.fp8_cache) as it,
    ):
        started = time.perf_counter()
        logits = it.prefill(batch.to(device), lengths, request.chunk)
        latest = choose(logits)
        prefilled = time.perf_counter()
        steps = 0
        for step in range(request.new_tokens):
            shown = []
            for sequence, token in enumerate(latest.tolist()):
                over[sequence] |= token == tokens.end and not request.ignore_end
                shown.append(-1 if over[sequence] else token)
                texts[sequence] += [] if over[sequence] else [token]
            yield shown
            if all(over) or step == request.new_tokens - 1:
                break
            latest = choose(it.extend(latest[:, None])[:, 0])
            steps += 1
        done = time.perf_counter()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        held = rss if cpu.active() else torch.cuda.max_memory_allocated()
        everywhere = gather_objects((it.nbytes, held))
        yield Report(
            tokens=texts,
            prompt_tokens=sum(lengths),
            prefill_s=prefilled - started,
            decode_s=done - prefilled,
            decoded=steps,
            cache_bytes=[cache for cache, _ in everywhere],
            memory_bytes=[memory for _, memory in everywhere],
        )


NOT_OF_A_MODEL = (
    "--micro-batch-size 1 --train-iters 1 --lr 1 --optimizer sgd --mock-data "
    "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 --no-load-optim --no-load-rng "
    "--exit-on-missing-checkpoint --no-masked-softmax-fusion --no-one-logger"
)
"""Training flags that Megatron's parser requires."""
DEFAULT_PROVIDER = "striped"


def flags(saved: tuple[Path, int | None] | None, rest: list[str]) -> list[str]:
    """Flags of the checkpoint's model, of no training, of the ranks, and last the user's (``rest``), which win.

    saved: folder and iteration of a checkpoint; None: the user gives all flags. ValueError as of ``saved_model.flags``.
    """
    model: list[str] = []
    if saved is not None:
        empty = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        model = saved_model.flags(*saved, empty)
    names = {word.partition("=")[0] for word in rest}
    ranks: list[str] = []
    if saved is not None and "--context-parallel-size" not in names:
        tensor = whole_number(peek(rest, "--tensor-model-parallel-size") or "") or 1
        size = int(os.environ["WORLD_SIZE"]) // tensor
        ranks = ["--context-parallel-size", str(size)]
        if size > 1 and "--cp-provider" not in names and "--cp-linear-attention" not in model:
            ranks += ["--cp-provider", DEFAULT_PROVIDER]
    return [*model, *NOT_OF_A_MODEL.split(), *ranks, *rest]


def load() -> torch.nn.Module:
    """The model that `sys.argv` describes, with the weights of ``--load``.

    ValueError for flags that ``gpt`` refuses, and for several model chunks on a rank.
    """
    gpt.refuse(arguments.parse_args())
    cpu.use_compiled_helper()
    try:
        arguments.parse_and_validate_args()
        initialize.initialize_megatron()
    except AssertionError as error:
        raise ValueError(f"Megatron refuses the flags: {error}") from error
    chunks = training.get_model(gpt.build_model, wrap_with_ddp=False)
    if len(chunks) != 1:
        raise ValueError("generation does not support virtual pipeline stages: leave their flags out")
    if get_args().load is not None:
        checkpointing.load_checkpoint(chunks, None, None)
    if runtime.settings().active:
        audit.run(chunks)
    return chunks[0].eval()
