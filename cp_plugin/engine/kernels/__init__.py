"""Attention kernels on one device, merging of partial results, and backends."""
