"""Training steps of a small decoder of transformers over process groups, against one rank without the plugin.

Its weights are random, and nothing is downloaded. Limits are those of ``megatron_training``.
"""

from __future__ import annotations

import os
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from cases import provider
from megatron_training import RANKS, STEPS, Trained, judged, limits_of, ranks_in_time, right
from over_ranks import device, join, refused
from record import Found, Step

PROVIDERS = ("ring", "attention2d", "ulysses")
LEARNING_RATE = 0.05
SECONDS = 30.0


def main() -> None:
    with Step("huggingface") as step:
        title = "training steps of transformers"
        if find_spec("transformers") is None:
            step.not_run(title, "transformers is not installed")
        elif reason := refused(step, RANKS):
            step.not_run(title, reason)
        else:
            import transformers
            import transformers.models.llama.modeling_llama

            import cp_plugin.huggingface  # noqa: F401  (once for all ranks, which are forked)

            title += f" {transformers.__version__}"
            for name in PROVIDERS:
                step.attempt(title, name, partial(right, partial(compared, name, step), step), (provider(name),))


def compared(name: str, step: Step) -> Found:
    """Whether every rank has the losses and gradients of one."""
    want = one_rank(torch.float32 if step.smoke else torch.bfloat16, step)
    got = train(RANKS, name, torch.float32 if step.smoke else torch.bfloat16, step)
    return judged(got, want, limits_of(want, None if step.smoke else one_rank(torch.float32, step)))


@cache
def one_rank(dtype: torch.dtype, step: Step) -> Trained:
    """Without the plugin."""
    return train(1, "", dtype, step)[0]


def train(ranks: int, name: str, dtype: torch.dtype, step: Step) -> list[Trained]:
    return ranks_in_time(rank, ranks, (name, dtype, step.devices), step, SECONDS)


def rank(name: str, dtype: torch.dtype, devices: int) -> Trained:
    """Steps of gradient descent; ``name``: the provider, or "" for the model as it is."""
    ranks = int(os.environ["WORLD_SIZE"])
    join(int(os.environ["RANK"]), devices, ranks, SECONDS)
    model, tokens = decoder(dtype, small=not devices)
    given = {"input_ids": tokens, "labels": tokens}
    if name:
        from cp_plugin import ContextParallel, huggingface

        cp = ContextParallel(name, group=dist.group.WORLD)
        huggingface.apply(model, cp)
        given = huggingface.shard(cp, tokens)
    losses, gradients = [], {}
    for _ in range(STEPS):
        loss = model(**given).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        total, *grads = (x.detach().float() for x in (loss, *grads))
        for x in (total, *grads):
            dist.all_reduce(x)
        losses.append(total.item())
        named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
        gradients = gradients or {name: x.cpu() for name, x in named.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= (LEARNING_RATE * named[name]).to(dtype)
    return Trained(losses, gradients, {}, {}, True)


def decoder(dtype: torch.dtype, *, small: bool) -> tuple[Any, torch.Tensor]:
    """A Llama, always with the same weights, and tokens ``[2, s]``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, length = (64, 64) if small else (512, 2048)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).to(device(), dtype).train(), tokens.to(device())


if __name__ == "__main__":
    main()
