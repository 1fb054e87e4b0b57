"""Helpers that know nothing of attention: messages, names, entry points, caches, YAML, versions, torch.compile."""
