"""Evidence for the planner: predictions compared with published figures (``python ci/papers``).

../published/*.toml  the papers' figures by row, and our counterparts of their methods
data.py             loads them
stacks.py           machines and software they were measured on, with fittable parameters
experiment.py       the planner's prediction of a row
fitting.py          cross-validated fits, excluding the table or paper being judged
reproduce.py        all predictions and accuracy targets
score.py            errors, order and ratios of methods, and nearest-neighbour baselines
report.py, plot.py  docs/papers.md and its pictures
situations.py       a method for typical trainings: docs/choose.md
regimes.py          comparison with stock Megatron: docs/wins.md

../measured/*.toml  raw measurements of collectives, kernels and trainings, excluded from all fits
measurements.py     kinds of measurements and their predictions
measured.py         loads them, and computes errors
measured_report.py  docs/measured.md and its pictures
"""
