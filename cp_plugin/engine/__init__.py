"""Context-parallel attention itself: layouts, kernels, methods, and the public call. Knows no trainer."""
