"""One transformers `Trainer`, N policies: DDP, DeepSpeed, FSDP2, checkpoints, the Hub, log-probabilities.

`multi_policy.py` is the place to begin. May use `generation/`, agents and what is below them.
"""
