"""Rules of sharing, one a file: what a learner makes of its peers' rollouts. `rule.py` says what a rule is.

`RULES` has them by their name in `HACPOConfig.algorithm`. A new one is a file here and a line below.
"""

from .alone import GRPO, GSPO
from .hacpo import HACPO
from .naive import Naive
from .rule import SharingRule


RULES: dict[str, type[SharingRule]] = {"hacpo": HACPO, "naive": Naive, "gspo": GSPO, "grpo": GRPO}

__all__ = ["GRPO", "GSPO", "HACPO", "RULES", "Naive", "SharingRule"]
