"""Serving: prices of prefill, decode and the KV cache."""
