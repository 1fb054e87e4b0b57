"""Which method, on which grid, how fast: predictions from hardware profiles and the methods themselves."""
