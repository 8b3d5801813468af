"""Evaluation on held-out problems: during training (`during_training.py`), and of finished models on benchmarks.

`tasks.py`, `jobs.py`, `metrics.py`, `report.py` are the parts of `hacpo evaluate`. May use `generation/`, `rewards/`,
`embedded/` and what is below them.
"""
