"""Program of test_bridge_te: builds a GPT of Bridge's default spec, and audits it.

A process of its own, whose CPU mode does not hide Transformer Engine: the modules are built and audited, not run.
"""

from __future__ import annotations

import transformer_engine.pytorch  # noqa: F401
from bridge_harness import recipe

from cp_plugin.testing.launch import run_ranks


class _Built(BaseException):
    """Raised where a rank stops."""


def build() -> tuple[list[str], list[str], set[str]]:
    """Replaced layers, layers that were missed, classes of all modules."""
    from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from cp_plugin import nemo
    from cp_plugin.megatron.selfcheck import audit

    found = []
    run = audit.run

    def audit_and_stop(chunks: list) -> None:
        run(chunks)
        coverage = audit.coverage(chunks, 0)
        names = {type(module).__name__ for chunk in chunks for module in chunk.modules()}
        found.append((list(coverage.replaced), list(coverage.missed), names))
        raise _Built

    audit.run = audit_and_stop
    config = recipe({"context_parallel_size": 2, "transformer_layer_spec": transformer_engine_layer_spec})
    nemo.apply(config, "striped")
    try:
        pretrain(config, forward_step)
    except _Built:
        return found[0]
    raise AssertionError("the model was not audited")


if __name__ == "__main__":
    from cp_plugin import nemo
    from cp_plugin.megatron.cpu import mode as cpu

    cpu._HIDDEN = tuple(name for name in cpu._HIDDEN if not name.startswith("transformer_engine"))
    nemo.activate()
    for replaced, missed, names in run_ranks(build, 2, timeout=240.0):
        assert len(replaced) == 2 and not missed, (replaced, missed)
        assert "CoreAttention" in names and "TEDotProductAttention" not in names
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= names, names
    print("every core attention of Bridge's default spec is the plugin's")
