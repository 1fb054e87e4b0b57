"""Attention of a block of queries and keys on one device: the block kernel, merging, and the libraries behind it."""
