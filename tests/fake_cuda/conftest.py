"""One GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from equipment.cuda import libraries
from equipment.cuda.device import FakeCuda, Start


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the device, with our kernels, Transformer Engine and one generation of flash-attn on it."""
    started: list[FakeCuda] = []

    def start(*, capability: tuple[int, int] = (9, 0), **options: Any) -> FakeCuda:
        device = FakeCuda(capability)
        libraries.install(monkeypatch, device, **options)
        started.append(device.__enter__())
        return device

    yield start
    for device in started:
        device.__exit__()
    libraries.forget()
