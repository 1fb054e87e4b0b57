"""Run-time checks: audit of the built model, a step before training, sampled calls, batches and angles in it."""
