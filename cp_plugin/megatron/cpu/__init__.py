"""CPU mode: Megatron without CUDA, for tests and first steps."""
