"""What is to be written, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cp_plugin.inference.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to write. Raises ValueError for what makes no sense."""

    prompts: tuple[str, ...]
    new_tokens: int
    as_bytes: bool = False
    """Tokens are the bytes of the text, instead of those of the model's tokenizer."""
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int | None = None
    """Tokens of a prompt at a time; None: all at once."""
    fp8_cache: bool = False
    """Keep keys and values in one byte an element."""
    ignore_end: bool = False
    """Go on behind the end of a document."""

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("--prompt must not be empty")
        if self.new_tokens < 1:
            raise ValueError(f"--new-tokens {self.new_tokens}: 1 or more")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"--chunk {self.chunk}: 1 or more tokens of the prompt at a time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it; times in seconds."""

    tokens: list[list[int]]
    """Of each text, the prompt's included."""
    prompt_tokens: int
    prefill_s: float
    """Until the first new token."""
    decode_s: float
    decoded: int
    """Steps of decode: one less than new tokens."""
    cache_bytes: list[int]
    """Of each rank."""
    memory_bytes: list[int]
    """The most that each rank has held: of CUDA memory, or of the process."""
