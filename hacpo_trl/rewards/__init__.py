"""Ready-made reward functions, and `verification.py`, which calls them: `f(completions, **columns)`.

Each is a file; `math_verification.py`, with `math_text.py` and `math_values.py`, and `sandbox.py` run apart from the
trainer. May use `reporting/metrics.py`.
"""

from .code import CodeReward, SandboxError, SandboxLimits, code_reward
from .format import ThinkFormatReward, boxed_format_reward, think_format_reward
from .http_judge import HTTPJudge
from .math import MathReward, math_reward
from .reward_model import RewardModel


__all__ = [
    "CodeReward",
    "HTTPJudge",
    "MathReward",
    "RewardModel",
    "SandboxError",
    "SandboxLimits",
    "ThinkFormatReward",
    "boxed_format_reward",
    "code_reward",
    "math_reward",
    "think_format_reward",
]
