"""Megatron without CUDA, for tests and first steps on a laptop."""

DEVICES = ("auto", "cpu", "cuda")
"""The choices of ``--cp-device``."""
