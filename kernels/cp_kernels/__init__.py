"""Triton kernels for context-parallel attention; they depend on torch and triton only.

All kernels also run on CPU tensors if ``TRITON_INTERPRET=1`` is set before triton is imported.
"""
