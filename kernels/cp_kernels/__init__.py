"""Triton kernels for context-parallel attention. They need torch and triton, and nothing else of this project.

Every kernel also runs on CPU tensors where ``TRITON_INTERPRET=1`` was set before triton was imported.
"""
