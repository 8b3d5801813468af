"""Evaluation of models and of training runs on benchmarks; the command is `python -m hacpo_trl.evaluate`."""
