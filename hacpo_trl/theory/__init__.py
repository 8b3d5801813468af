"""What HACPO's theorems say, computed: baselines by Monte Carlo (`baselines.py`), gradients exactly (`gradients.py`).

`examples/theory.py` prints it, docs/theory.md discusses it. May use `algorithm/` and `reporting/`.
"""
