"""What the planner predicts, beside what papers published, and beyond it: ``python ci/papers``.

../published/*.toml  the papers' figures, row by row, and which method of ours stands for which of theirs
data.py             reads them
stacks.py           the machines and the software they were measured on, and what may be fitted there
experiment.py       how long a row takes by the planner
fitting.py          what is fitted, and to which rows: to none of the table, or the paper, that is judged
reproduce.py        all of it, and what is aimed at
score.py            errors, order and ratios of methods, and copies of similar rows to compare with
report.py, plot.py  the page and its pictures
situations.py       which method for which training: docs/choose.md
regimes.py          where the plugin wins beside stock Megatron, and where not: docs/wins.md
beyond.py           comparisons that nobody published: docs/beyond.md

../measured/*.toml  raw measurements of collectives, kernels and trainings, which nothing is fitted to
measurements.py     what kinds there are, and what the packaged profiles predict for each
measured.py         reads the files, and counts errors
measured_report.py  tables and pictures of them: docs/measured.md
"""
