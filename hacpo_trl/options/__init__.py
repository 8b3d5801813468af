"""What settings mean and which of them go together: an agent's, the arithmetic of a step, vLLM's, checks of the whole.

`config.py` has the run's settings themselves. May use `algorithm/`.
"""
