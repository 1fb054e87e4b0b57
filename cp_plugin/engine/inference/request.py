"""A generation request, sampling, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 0.0
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: no limit."""
    top_p: float = 1.0
    """Sample from the most likely tokens of this total probability (nucleus sampling, arXiv 1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: write 0 (always the most likely token) or more")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: write 0 (no limit) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p {self.top_p}: write a number above 0, and at most 1 (no limit)")
        if self.temperature == 0.0 and (self.top_k or self.top_p != 1.0):
            raise ValueError(
                "--top-k and --top-p have no effect without --temperature: add --temperature 1, or leave them out"
            )


class Sampler:
    """Samples tokens with a random generator of its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """``[b, vocabulary]`` -> int64 ``[b]`` on the same device. Drawn on the CPU, so equal on all devices."""
        if self._sampling.temperature == 0.0:
            return logits.argmax(-1)
        scores = logits.double().cpu() / self._sampling.temperature
        if 0 < self._sampling.top_k < scores.size(1):
            least = scores.topk(self._sampling.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        weights = scores.softmax(-1)
        if self._sampling.top_p < 1.0:
            ordered, order = weights.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self._sampling.top_p  # those before it are already enough
            weights = weights.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), 0.0)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0].to(logits.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate; ValueError for invalid values."""

    prompts: tuple[str, ...]
    new_tokens: int
    as_bytes: bool = False
    """Tokens are the bytes of the text instead of the model's tokenizer's."""
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int | None = None
    """Tokens of a prompt to prefill at a time; None: all at once."""
    fp8_cache: bool = False
    """Keep keys and values in FP8, one byte per element."""
    ignore_end: bool = False
    """Go on after the end of a document."""

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("--prompt must not be empty")
        if self.new_tokens < 1:
            raise ValueError(f"--new-tokens {self.new_tokens}: write 1 or more")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"--chunk {self.chunk}: write 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The texts and their cost; times in seconds."""

    tokens: list[list[int]]
    """Of each text, including the prompt."""
    prompt_tokens: int
    prefill_s: float
    """Time to the first new token."""
    decode_s: float
    decoded: int
    """Decode steps: new tokens minus one."""
    cache_bytes: list[int]
    """Per rank."""
    memory_bytes: list[int]
    """Peak memory per rank: CUDA's, or the process's."""
