"""Generation from a Megatron model: prefill and decoding with context parallelism."""
