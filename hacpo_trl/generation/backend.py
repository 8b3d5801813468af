"""Generation: how agents answer prompts.

A backend answers the prompts of *all* agents in one call, because servers, one an agent, should work side by side.
There are three: transformers' `generate` (`transformers_generation.py`), which needs no server and samples the agents
one after the other; a vLLM engine for each agent in the training processes (`vllm_colocate.py`); a vLLM server for
each agent (`vllm_servers/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..agent import Agent
from ..reporting.metrics import Metrics


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        ids: The sampled token ids, the stop token included.
        finish_reason: `"stop"` when a stop token ended it, `"stop_string"` when its text came to a stop string,
            `"length"` when it was cut.
        logps: The log-probability of each token in nats, at the sampling temperature, where the sampler gives it.
    """

    ids: tuple[int, ...]
    finish_reason: Literal["stop", "stop_string", "length"]
    logps: tuple[float, ...] | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """What one agent is asked: `num_generations` answers to each prompt.

    Attributes:
        prompt_ids: The prompts, in the agent's tokens.
        num_generations: Answers to each prompt.
        seed: Seed of the samples.
    """

    prompt_ids: Sequence[Sequence[int]]
    num_generations: int
    seed: int


class GenerationBackend(Protocol):
    """Anything that samples for the agents of this process."""

    def sync_weights(self):
        """Called before each generation: brings the agents' weights to where samples are drawn. Collective."""
        ...

    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        """For each agent its answers, prompt by prompt, `num_generations` in a row."""
        ...


def requests_for(
    agents: Mapping[str, Agent],
    prompt_ids: Mapping[str, Sequence[Sequence[int]]],
    num_generations: int,
    mode: str,
    step: int,
    process: int,
) -> dict[str, GenerationRequest]:
    """The same number of answers of every agent to its prompts, from the random streams of `Agent.sampling_seed`."""
    return {
        name: GenerationRequest(ids, num_generations, agents[name].sampling_seed(mode, step, process))
        for name, ids in prompt_ids.items()
    }


def completion_of(agent: Agent, ids: Sequence[int], logps: Sequence[float] | None = None) -> Completion:
    """An agent's answer out of what a sampler returned: padding is cut off, behind its first stop."""
    end = next((i + 1 for i, token_id in enumerate(ids) if token_id in agent.stop_token_ids), None)
    by_string = agent.end_of_stop_string(ids[:end])
    finish_reason: Literal["stop", "stop_string", "length"] = "length" if end is None else "stop"
    if by_string is not None and (end is None or by_string < end):
        end, finish_reason = by_string, "stop_string"
    return Completion(tuple(ids[:end]), finish_reason, None if logps is None else tuple(logps[:end]))


def log_completions(metrics: Metrics, agent: str, completions: Sequence[Completion]):
    """Logs the lengths of one agent's answers, in its tokens."""
    lengths = torch.tensor([len(completion.ids) for completion in completions], dtype=torch.float32)
    cut = torch.tensor([completion.finish_reason == "length" for completion in completions])
    metrics.mean(f"{agent}/completions/mean_length", lengths)
    metrics.minimum(f"{agent}/completions/min_length", lengths)
    metrics.maximum(f"{agent}/completions/max_length", lengths)
    metrics.mean(f"{agent}/completions/mean_terminated_length", lengths[~cut])
    metrics.mean(f"{agent}/completions/clipped_ratio", cut)
    metrics.total(f"{agent}/tokens/generated", int(lengths.sum()))
