"""A rollout, and what a learner makes of it.

`Rollout` is the one record that agents exchange. It is plain data that survives JSON, because an exchange may one day
cross processes, machines and organisations: beside the sampled text it holds nothing of the source model but a sum of
log-probabilities and a token count.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal


# A prompt in TRL's dataset formats: plain text, or a list of {"role": ..., "content": ...} messages.
Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Rollout:
    """One sampled answer of one agent, verified.

    Attributes:
        agent: Name of the source, the agent that sampled it.
        prompt: The prompt, before any chat template.
        prompt_index: Which of this process's prompts of the step it answers.
        completion_ids: The sampled token ids, in the source's tokenizer, the stop token included.
        text: The answer as text: the ids without their final stop token and without special tokens.
        decodable: False when the text does not stand for the ids: it holds a replacement character where a multi-byte
            character was cut, or some ids lie beyond the tokenizer.
        finish_reason: `"stop"` when the source ended the answer by a stop token, `"stop_string"` when it came to a
            stop string, `"length"` when it was cut.
        logprob_sum: log π_old(y) of the source in nats, at its sampling temperature, over `completion_ids`.
        reward: The verdict, or None when no reward function gave one.
        policy_version: Optimizer updates the source had had when it sampled.
    """

    agent: str
    prompt: Prompt
    prompt_index: int
    completion_ids: tuple[int, ...]
    text: str
    decodable: bool
    finish_reason: Literal["stop", "stop_string", "length"]
    logprob_sum: float
    reward: float | None
    policy_version: int

    @property
    def num_tokens(self) -> int:
        """|y|, in the source's tokens."""
        return len(self.completion_ids)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "Rollout":
        record = json.loads(line)
        return cls(**{**record, "completion_ids": tuple(record["completion_ids"])})


@dataclass(frozen=True)
class LearnerView:
    """A rollout in the tokens of the agent that learns from it.

    Attributes:
        rollout: The rollout.
        prompt_ids: The prompt in the learner's tokens, its own chat template applied.
        completion_ids: The answer in the learner's tokens: the sampled ids where the learner is the source.
        dropped: Why the learner cannot learn from it (see `hacpo_trl.rollouts.retokenization`), or None.
    """

    rollout: Rollout
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    dropped: str | None

    @property
    def unusable(self) -> str | None:
        """Why it is not in the learner's loss: `dropped`, or that there is no verdict; None if it is."""
        return self.dropped or ("no_verdict" if self.rollout.reward is None else None)
