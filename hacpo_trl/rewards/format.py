r"""Format rewards: reasoning in think tags, and a final answer in `\boxed{}`.

Differs from `trl.rewards.think_format_reward` in what a completion has to look like when the chat template has already
written `<think>`: then the completion begins inside the reasoning and must not open it again.
"""

from collections.abc import Sequence

from .math import completion_text
from .math_text import last_boxed


OPEN, CLOSE = "<think>", "</think>"


class ThinkFormatReward:
    """Reward function: 1.0 for one block of reasoning in think tags followed by an answer, else 0.0.

    The reasoning comes first, is opened and closed once, and neither it nor the answer is blank.

    Args:
        opened_by_template: whether the prompt ends in `<think>`. `None` looks at the prompts: at their text, or at the
            last message of a conversation when it is the beginning of the assistant's. A conversation that ends with
            the user does not show what its template appends; set this to `True` for a template that opens the tag.
    """

    def __init__(self, opened_by_template: bool | None = None):
        self.__name__ = "think_format_reward"
        self.opened_by_template = opened_by_template

    def __call__(
        self, completions: Sequence[str | list[dict]], prompts: Sequence[str | list[dict]] | None = None, **kwargs
    ) -> list[float]:
        """Rewards of a batch of completions: texts, or conversations whose last message is judged."""
        if prompts is None:
            prompts = [""] * len(completions)
        return [
            self._score(completion_text(completion), self._is_opened(prompt))
            for completion, prompt in zip(completions, prompts, strict=True)
        ]

    def _is_opened(self, prompt: str | list[dict]) -> bool:
        if self.opened_by_template is not None:
            return self.opened_by_template
        if not isinstance(prompt, str):
            prompt = completion_text(prompt) if prompt and prompt[-1].get("role") == "assistant" else ""
        return prompt.rstrip().endswith(OPEN)

    def _score(self, text: str, is_opened: bool) -> float:
        text = text.strip()
        if not is_opened:
            if not text.startswith(OPEN):
                return 0.0
            text = text[len(OPEN) :]
        reasoning, closing, answer = text.partition(CLOSE)
        is_single = OPEN not in text and CLOSE not in answer
        return float(bool(is_single and closing and reasoning.strip() and answer.strip()))


def boxed_format_reward(completions: list[str] | list[list[dict]], **kwargs) -> list[float]:
    r"""Reward function: 1.0 for a completion whose last `\boxed{...}` is closed and not empty, else 0.0.

    Where there is reasoning in think tags, the box has to come after it.
    """
    rewards = []
    for completion in completions:
        content = last_boxed(completion_text(completion).rpartition(CLOSE)[2])
        rewards.append(float(bool(content and content.strip())))
    return rewards


think_format_reward = ThinkFormatReward()
