"""What a cluster is, and how long kernels, passes over memory and messages take on it."""
