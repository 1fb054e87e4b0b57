"""Prefill and decoding priced: what a prompt, a token and a cache take."""
