"""How fast everything is, as ratios of times that were taken in turns. Nothing here fails the check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from decode_speed import decode
from kernel_speed import Size, kernels
from memory_speed import one_pass
from method_speed import methods
from record import Step


def main() -> None:
    with Step("performance") as step:
        if step.smoke:
            sizes, pass_tokens, ranks = [Size(64, 2, 16, 1)], 64, 2
        else:
            sizes, pass_tokens, ranks = [Size(16384), Size(65536)], 65536, 8
        parts: dict[str, Callable[[], None]] = {
            "speed of attention kernels": lambda: kernels(step, sizes),
            "bandwidth of our kernels": lambda: one_pass(step, pass_tokens, 1 if step.smoke else 10),
        }
        parts["bandwidth of decode"] = lambda: decode(step)
        for size in sizes:
            parts[f"efficiency of methods, {size}"] = lambda size=size: methods(step, size, ranks)
        for name, part in parts.items():
            step.measure(name, part)
            if step.device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
