"""Machine models: profiles, and the time of kernels, memory passes and messages."""
