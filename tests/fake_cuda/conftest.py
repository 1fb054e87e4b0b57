"""One GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from equipment.cuda import libraries
from equipment.cuda.device import FakeCuda, Start


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the device, with our kernels, Transformer Engine and one generation of flash-attn on it."""
    with ExitStack() as started:

        def start(*, capability: tuple[int, int] = (9, 0), **options: Any) -> FakeCuda:
            device = FakeCuda(capability)
            libraries.install(monkeypatch, device, **options)
            return started.enter_context(device)

        yield start
    libraries.forget()
