"""Reward functions in TRL's form: `f(completions, **columns) -> list[float | None]`, None to skip a row."""

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
