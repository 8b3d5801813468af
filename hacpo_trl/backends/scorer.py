"""The log-probabilities that a step asks for: of sources, of learners, of references."""

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import nn
from trl.trainer.utils import use_adapter

from ..agent import REFERENCE_ADAPTER, Agent
from ..algorithm.objective import sampler_weights
from ..config import HACPOConfig
from ..generation.backend import Completion
from ..learner import log_sampler_difference
from ..reporting.metrics import Metrics
from ..rollouts.rows import LearnerRow
from .log_probabilities import score_with_entropies


class Scorer:
    """Scores answers under the policies as they are before a step's updates.

    Args:
        agents: The agents, by name.
        engine: For each agent its accelerator and its wrapped policy, as they are when it is called.
        references: For each agent that has one its frozen initial policy, once training has begun.
        args: The run's settings.
        metrics: Where to log.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        engine: Callable[[str], tuple[Accelerator, nn.Module]],
        references: Mapping[str, nn.Module],
        args: HACPOConfig,
        metrics: Metrics,
    ):
        self.agents, self.engine, self.references, self.args, self.metrics = agents, engine, references, args, metrics

    def score(
        self, name: str, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], model=None
    ) -> list[torch.Tensor]:
        """Log-probabilities of answers in an agent's tokens, `(T,)` each, in nats.

        Args:
            name: The agent.
            prompt_ids: A prompt for each answer.
            completion_ids: The answers.
            model: Scores them; the agent's policy if None.
        """
        return self._score(name, prompt_ids, completion_ids, model)[0]

    def _score(
        self, name: str, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], model
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        accelerator, policy = self.engine(name)
        self.metrics.total(f"{name}/tokens/scored", sum(map(len, prompt_ids)) + sum(map(len, completion_ids)))
        return score_with_entropies(
            accelerator,
            policy if model is None else model,
            prompt_ids,
            completion_ids,
            self.agents[name].tokenizer.pad_token_id,
            self.args.per_device_train_batch_size,
        )

    def old_logps(
        self, name: str, prompt_ids: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> list[torch.Tensor]:
        """log π_old of an agent's own answers, token by token: recomputed, or the sampler's (`old_logprobs`)."""
        sampled = [None if completion.logps is None else torch.tensor(completion.logps) for completion in completions]
        if self.args.old_logprobs == "sampler":
            return sampled
        prompts = [ids for ids in prompt_ids for _ in range(self.args.num_generations)]
        scored, entropies = self._score(name, prompts, [completion.ids for completion in completions], None)
        self.metrics.mean(f"{name}/entropy", torch.cat(entropies))
        if all(logps is not None for logps in sampled):
            log_sampler_difference(self.metrics, name, torch.cat(scored), torch.cat(sampled))
        return scored

    def add_log_probabilities(
        self,
        learner: str,
        rows: Mapping[str, list[LearnerRow]],
        own_logps: Sequence[torch.Tensor],
        completions: Sequence[Completion],
    ):
        """What some settings want beside the sources' sums: of each token, of the learner, of a reference.

        Args:
            learner: The learner.
            rows: Its rows by source; they are completed in place.
            own_logps: `old_logps` of its own answers.
            completions: Its own answers.
        """
        own = rows[learner]
        if self.args.rule.token_level or self.args.old_logprobs == "sampler":
            for row, logps in zip(own, own_logps, strict=True):
                row.old_logps = logps
        if self.args.vllm_importance_sampling_correction:
            self._add_sampler_weights(learner, own, own_logps, completions)
        if self.args.algorithm == "naive" and self.args.naive_old_logprobs == "learner":
            peers = [row for source, of_source in rows.items() if source != learner for row in of_source]
            for row, logps in zip(peers, self._score_rows(learner, peers), strict=True):
                row.old_logprob_sum, row.old_num_tokens = float(logps.double().sum()), len(logps)
        if self.args.beta > 0:
            for row, logps in zip(own, self._score_by_reference(learner, own), strict=True):
                row.ref_logps = logps

    def _score_rows(self, name: str, rows: Sequence[LearnerRow], model=None) -> list[torch.Tensor]:
        return self.score(name, [row.prompt_ids for row in rows], [row.completion_ids for row in rows], model)

    def _score_by_reference(self, learner: str, rows: Sequence[LearnerRow]) -> list[torch.Tensor]:
        """Log-probabilities under the initial policy: a copy, or an adapter's model with the adapter as it came."""
        if learner in self.references:
            return self._score_rows(learner, rows, self.references[learner])
        policy = self.agents[learner].policy
        with use_adapter(policy, REFERENCE_ADAPTER if REFERENCE_ADAPTER in policy.peft_config else None):
            return self._score_rows(learner, rows)

    def _add_sampler_weights(
        self,
        learner: str,
        rows: Sequence[LearnerRow],
        logps: Sequence[torch.Tensor],
        completions: Sequence[Completion],
    ):
        args = self.args
        for row, of_trainer, completion in zip(rows, logps, completions, strict=True):
            row.sampler_weights = sampler_weights(
                of_trainer,
                torch.tensor(completion.logps),
                args.vllm_importance_sampling_mode,
                args.vllm_importance_sampling_clip_min,
                args.vllm_importance_sampling_clip_max,
            )
        weights = torch.cat([row.sampler_weights for row in rows])
        self.metrics.summary(f"{learner}/sampling/importance_sampling_ratio", weights)
