"""Generation with Megatron's static engine: prefill and decoding with context parallelism."""
