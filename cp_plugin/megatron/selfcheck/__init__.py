"""Run-time checks: audit of the built model, start-up self-check, sampled rows, traffic log."""
