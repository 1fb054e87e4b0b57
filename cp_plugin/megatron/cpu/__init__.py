"""Megatron without CUDA, for tests and first steps on a laptop."""
