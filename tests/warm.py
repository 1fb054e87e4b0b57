"""Trainings that are forked from a process that has imported Megatron: what each would do again is done before."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import warnings
from typing import Any


@functools.cache
def before_forking() -> None:
    """Import what a training imports late, read the help of Megatron's flags once, and make its mock data smaller.

    Megatron takes that help from its own source, 42 times in the start of a rank and a third of its time; shuffling
    its mock data, 100,000 documents of which a test reads a few, took a fifth of the rest. All of this holds for this
    process and those that are forked from it. To be called in CPU mode where there is no GPU.
    """
    with warnings.catch_warnings(action="ignore"):  # an experimental part of Megatron, which it imports in any case
        for module in ("megatron.core.models.mimo", "megatron.core.tokenizers.text.libraries", "torch._dynamo"):
            importlib.import_module(module)
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def read_once(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return known[config]

    ArgumentGroupFactory._get_field_docstrings = read_once
    MockGPTLowLevelDataset.size = 1000
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


class Forked:
    """As ``subprocess.Popen``, for one command: ``python -m cp_plugin.pretrain_gpt``, without importing it again."""

    def __init__(self, command: list[str], **_: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "cp_plugin.pretrain_gpt"]
        self.returncode = -1
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
                os.environ["OMP_NUM_THREADS"] = "1"
                from cp_plugin import pretrain_gpt

                sys.argv = ["pretrain_gpt", *command[3:]]
                status = pretrain_gpt.main()
            finally:
                sys.stdout.flush()
                os._exit(status)
        os.close(writing)
        self.stdout = os.fdopen(reading)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
