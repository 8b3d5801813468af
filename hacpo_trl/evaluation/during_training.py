"""Evaluation of a run's agents on held-out prompts, while they train: the same sampling, the same verdicts."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers.trainer_utils import speed_metrics

from ..agent import Agent
from ..config import HACPOConfig
from ..generation.backend import GenerationBackend, log_completions, requests_for
from ..reporting.metrics import Metrics
from ..rewards.verification import Answers, Verifier, log_evaluation, log_verdicts


def named_dataset(own: Any, name: str | None, prefix: str) -> tuple[Any, str]:
    """The trainer's `eval_dataset`, or that of its datasets which has a name; and the prefix of its metrics."""
    if own is None:
        raise ValueError("evaluate() needs an eval_dataset.")
    if name is None:
        return own, prefix
    if not isinstance(own, Mapping) or name not in own:
        there = f"has {sorted(own)}" if isinstance(own, Mapping) else "is one dataset without a name"
        raise ValueError(f"evaluate({name!r}): eval_dataset {there}.")
    return own[name], f"{prefix}_{name}"


@torch.no_grad()
def evaluate_agents(
    agents: Mapping[str, Agent],
    generation: GenerationBackend,
    verifier: Verifier,
    dataset: Dataset,
    args: HACPOConfig,
    accelerator: Accelerator,
    trainer_state: Any,
) -> dict[str, float]:
    """Every agent's mean reward, `num_generations_eval` sampled answers to each prompt. Collective.

    Args:
        agents: The agents, by name.
        generation: Samples their answers.
        verifier: Scores them.
        dataset: The prompts, and the columns of the reward functions.
        args: The run's settings.
        accelerator: Tells the processes.
        trainer_state: What reward functions get by this name.

    Returns:
        `<agent>/reward` and the rest of what `HACPOTrainer.evaluate` returns, without its prefix; and the speed.
    """
    start_time = time.time()
    generation.sync_weights()
    metrics = Metrics()
    num_generations, processes = args.num_generations_eval, accelerator.num_processes
    # Every process takes as many prompts as the others; those beyond the end repeat the last, and do not count.
    share = range(accelerator.process_index, -(-len(dataset) // processes) * processes, processes)
    batch = max(1, args.per_device_eval_batch_size // num_generations)
    for start in range(0, len(share), batch):
        indices = share[start : start + batch]
        examples = [dataset[min(index, len(dataset) - 1)] for index in indices]
        prompt_ids = {name: agent.render([e["prompt"] for e in examples]) for name, agent in agents.items()}
        completions = generation.generate(
            requests_for(agents, prompt_ids, num_generations, "eval", start, accelerator.process_index)
        )
        counted = sum(index < len(dataset) for index in indices) * num_generations
        repeated = [example for example in examples for _ in range(num_generations)][:counted]
        if not counted:
            continue
        answers = {}
        for name, of_agent in completions.items():
            ids = [completion.ids for completion in of_agent[:counted]]
            answers[name] = Answers(
                repeated, [agents[name].text_for_rewards(of_completion) for of_completion in ids], ids
            )
            log_completions(metrics, name, of_agent[:counted])
        for name, verdicts in verifier.verify(answers, trainer_state).items():
            log_verdicts(metrics, name, verdicts, verifier.names)
            log_evaluation(metrics, name, repeated, verdicts, num_generations)

    result = metrics.reduce()
    rewards = [result[f"{name}/reward"] for name in agents if f"{name}/reward" in result]
    if rewards:
        result["reward"] = sum(rewards) / len(rewards)
    speed = speed_metrics("", start_time, num_samples=len(dataset) * num_generations)
    return result | {name.removeprefix("_"): value for name, value in speed.items()}
