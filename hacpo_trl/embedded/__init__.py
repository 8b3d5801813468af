"""A whole heterogeneous setting that needs no download and fits on a CPU: tasks (`conv.py`) and `policies.py`.

Uses no other room.
"""

from .conv import conv_dataset, conv_reading, conv_reward, noisy_conv_reward
from .policies import EMBEDDED, POLICIES, policy_directory, policy_path, policy_paths


__all__ = [
    "EMBEDDED",
    "POLICIES",
    "conv_dataset",
    "conv_reading",
    "conv_reward",
    "noisy_conv_reward",
    "policy_directory",
    "policy_path",
    "policy_paths",
]
