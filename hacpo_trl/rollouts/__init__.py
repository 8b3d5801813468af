"""A rollout and its way from the agent that sampled it to the rows that another one trains on.

`rollout.py`, `retokenization.py`, `exchange.py`, `rows.py`, in this order; `completions.py` logs them.
May use `rewards/`, `options/` and what is below them.
"""
