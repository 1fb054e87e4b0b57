"""Bridge's own spec, which is Transformer Engine's: built with the real package, and audited.

The test runs this file as a program, whose CPU mode does not hide Transformer Engine: the modules are not run.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

WORDS = "every core attention of Bridge's default spec is the plugin's"


def test_every_core_attention_is_the_plugins() -> None:
    try:
        version("transformer-engine")
    except PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed here: ci/nemo.sh installs it where there is nvcc")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith(f"{WORDS}\n"), done.stderr[-3000:]


class _Built(BaseException):
    """Raised where a rank stops."""


def build() -> tuple[list[str], list[str], set[str]]:
    """Replaced layers, layers that were missed, classes of all modules."""
    from bridge_harness import recipe
    from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from cp_plugin import nemo
    from cp_plugin.megatron.selfcheck import audit

    run = audit.run

    def audit_and_stop(chunks: list) -> None:
        run(chunks)
        coverage = audit.coverage(chunks, 0)
        names = {type(module).__name__ for chunk in chunks for module in chunk.modules()}
        raise _Built(list(coverage.replaced), list(coverage.missed), names)

    audit.run = audit_and_stop
    config = recipe({"context_parallel_size": 2, "transformer_layer_spec": transformer_engine_layer_spec})
    nemo.apply(config, "striped")
    try:
        pretrain(config, forward_step)
    except _Built as built:
        return built.args
    raise AssertionError("the model was not audited")


if __name__ == "__main__":
    import transformer_engine.pytorch  # noqa: F401

    from cp_plugin import nemo
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.testing.launch import run_ranks

    cpu._HIDDEN = tuple(name for name in cpu._HIDDEN if not name.startswith("transformer_engine"))
    nemo.activate()
    for replaced, missed, names in run_ranks(build, 2, timeout=240.0):
        assert len(replaced) == 2 and not missed, (replaced, missed)
        assert "CoreAttention" in names and "TEDotProductAttention" not in names
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= names, names
    print(WORDS)
