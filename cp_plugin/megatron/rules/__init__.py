"""Rules: refusals, adjustments and warnings before training."""
