"""Evidence for the planner: predictions compared with published figures (``cp-plugin plan --reproduce``).

../published/*.toml  the papers' figures by row, and our counterparts of their methods
data.py         loads them, and machines and software they were measured on
experiment.py   the planner's prediction of a row
report.py       predictions, errors, order and ratios of methods: docs/papers.md
regimes.py      comparison with stock Megatron: docs/wins.md
"""
