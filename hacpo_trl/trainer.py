"""HACPOTrainer: N language models learn together from each other's rollouts (arXiv 2603.02604, Algorithm 1).

One step, on every process for its share of the prompts:

    1. sample      every agent answers the same prompts                     generation.py, or vLLM: vllm_servers/
    2. verify      every answer is scored once                              verification.py
       capability  windows and ratios ω                                     capability.py
       score       log π_old of every agent's own answers                   scoring.py
    3. exchange    every learner gets every answer, in its own tokens       rollout.py, retokenization.py, exchange.py
       advantages  with the capability-aware baseline                       advantages.py, learner.py
    4. update      U optimizer updates of every agent                       objective.py, learner.py, multi_policy.py

Everything that needs a policy's weights before the updates happens before the first backward pass, and nothing that
one agent does depends on the order in which agents are listed.

A checkpoint may fall between the updates of a step; it then holds the rest of the step's rows, and the resumed run
continues where it was.
"""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import speed_metrics
from trl.data_utils import is_conversational
from trl.trainer.utils import disable_dropout_in_model, identity, use_adapter

from .agent import build_agents, reference_of
from .benchmarks import filter_long_prompts
from .callbacks import RewardTableCallback
from .capability import CapabilityWindow, performance_counts
from .completions import CompletionLog
from .config import HACPOConfig
from .data import LearnerRow, StepSampler, arrange, collate, prompts_per_update
from .exchange import exchange
from .generation import (
    Completion,
    GenerationBackend,
    GenerationRequest,
    TransformersGeneration,
    log_completions,
)
from .learner import Alignment, learner_advantages, learner_objective, log_objective, log_sampler_difference
from .metrics import Metrics
from .multi_policy import MultiPolicyTrainer
from .objective import sampler_weights
from .rollout import LearnerView, Rollout
from .scoring import completion_logps, prepare_policy, score
from .verification import RewardFunction, Verdicts, Verifier, check_datasets, log_evaluation, log_verdicts


# In a checkpoint: what the run knows beside weights and optimizers, and what a process still has to train on.
RUN_STATE = "hacpo_state.json"
PROCESS_STATE = "hacpo_process_{}.pt"


class HACPOTrainer(MultiPolicyTrainer):
    """Trains any number of agents together by reinforcement learning with verifiable rewards.

    ```python
    trainer = HACPOTrainer(
        models={"qwen": "Qwen/Qwen3-4B-Base", "llama": "meta-llama/Llama-3.2-3B-Instruct"},
        reward_funcs=math_reward,
        args=HACPOConfig("outputs", per_device_train_batch_size=16, gradient_accumulation_steps=32),
        train_dataset=dataset,  # a column "prompt"; the others go to the reward functions
    )
    trainer.train()
    ```

    Args:
        models: For each agent by name its model: an id on the Hub, a path, or a loaded model. None takes agents and
            models from `args.agents`.
        reward_funcs: One reward function or several; see `hacpo_trl.verification`. A sequence classification model, or
            the id of one, is a reward model, as in TRL.
        args: The settings.
        train_dataset: Prompts, plain or conversational, in a column `prompt`. Those too long for one agent are left
            out for all.
        eval_dataset: The same for evaluation, or a dict of such datasets. With a column `source`, rewards are also
            reported for each source.
        processing_classes: For each agent by name its tokenizer; those left out are loaded from where the model came
            from.
        callbacks: Further callbacks.
        peft_configs: For each agent by name a `peft.PeftConfig`; it then trains an adapter. Agents may be left out.
        reward_processing_classes: The tokenizers of reward models, one for each of `reward_funcs` (None for
            functions).
        generation_backend: Samples in place of transformers' `generate` or of vLLM.
    """

    def __init__(
        self,
        models: Mapping[str, str | PreTrainedModel] | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: HACPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_classes: Mapping[str, PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_configs: Mapping[str, Any] | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        generation_backend: GenerationBackend | None = None,
    ):
        if args is None:
            raise ValueError("HACPOTrainer needs args, a HACPOConfig.")
        if reward_funcs is None:
            raise ValueError("HACPOTrainer needs reward_funcs, at least one reward function.")
        if generation_backend is not None and args.use_vllm:
            raise ValueError("use_vllm=True has no effect beside a generation_backend. Leave one of them out.")
        self.verifier = Verifier(reward_funcs, args.reward_weights, reward_processing_classes)
        check_datasets(train_dataset, eval_dataset)
        agents = build_agents(models, args, processing_classes or {}, peft_configs or {})
        if train_dataset is not None:
            train_dataset = filter_long_prompts(train_dataset, agents, "train_dataset")
        if isinstance(eval_dataset, Mapping):
            eval_dataset = {n: filter_long_prompts(d, agents, f"eval_dataset['{n}']") for n, d in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = filter_long_prompts(eval_dataset, agents, "eval_dataset")
        self.plan = args.step_plan(len(agents))
        if train_dataset is not None and len(train_dataset) < self.plan.prompts:
            raise ValueError(
                f"train_dataset has {len(train_dataset)} prompts, but one step takes "
                f"prompts_per_step={self.plan.prompts}."
            )
        self.micro_batches_per_step = self.plan.updates * args.gradient_accumulation_steps
        # The KL term measures the distance to the initial policy: copied before training or resuming moves it.
        references = {
            name: reference_of(agent, args) for name, agent in agents.items() if args.beta > 0 and not agent.is_adapter
        }
        for name, reference in references.items():
            prepare_policy(reference.requires_grad_(False), agents[name].temperature)
        for agent in agents.values():
            prepare_policy(agent.policy, agent.temperature)
            if args.disable_dropout:
                disable_dropout_in_model(agent.policy)
        super().__init__(
            agents,
            args,
            references,
            data_collator=identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
        )
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self.add_callback(RewardTableCallback(list(self.agents)))

        self.generation = generation_backend or self._generation_backend()
        self.capability = CapabilityWindow(list(self.agents), args.capability_window)
        self.metrics = Metrics()
        self.alignment = Alignment()
        self.token_totals: dict[str, float] = defaultdict(float)
        self.completion_log = CompletionLog(args)
        # Of the last update; empty before the first.
        self.grad_norms: dict[str, float] = {}
        self.learning_rates: dict[str, float] = {}
        self._micro_step = 0
        self._seconds: dict[str, float] = defaultdict(float)
        # The step's rows of each learner, in the order of its updates; None between steps.
        self._rows: dict[str, list[LearnerRow]] | None = None

    def _generation_backend(self) -> GenerationBackend:
        if not self.args.use_vllm:
            return TransformersGeneration(self.agents, self.engine, self.args.ds3_gather_for_generation)
        # Imported here: where vLLM is installed, what both have of TRL imports it.
        if self.args.vllm_mode == "server":
            from .vllm_servers.generation import VLLMServerGeneration as Backend
        else:
            from .vllm_colocate import VLLMColocateGeneration as Backend
        return Backend(self.agents, self.engine, self.args, lambda: self.weights_version)

    # ---- data -------------------------------------------------------------------------------------------------------
    def get_train_dataloader(self):
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.plan.prompts // self.accelerator.num_processes,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Dataset) -> StepSampler:
        return StepSampler(
            num_prompts=len(train_dataset),
            prompts_per_step=self.plan.prompts,
            repeats=self.micro_batches_per_step,
            prompts_per_update=prompts_per_update(self.plan, self.args.num_generations, self.args.minibatch_order),
            num_processes=self.accelerator.num_processes,
            seed=self.args.seed if self.args.shuffle_dataset else None,
            epoch=lambda: int(self.state.epoch or 0),
        )

    # ---- one step, Algorithm 1 --------------------------------------------------------------------------------------
    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One micro-batch of every agent; the first one of a step collects the step's rollouts."""
        model.train()
        position = self._micro_step % self.micro_batches_per_step
        if self._rows is None:
            assert position == 0, "the rows of a step that is under way are gone"
            self._rows = self._collect_rows(inputs)
            self._rows_in_loss = self._count_rows_in_loss(self._rows)
        update = position // self.args.gradient_accumulation_steps
        size = self.args.per_device_train_batch_size
        losses = []
        with self._phase("update"):
            for name, rows in self._rows.items():
                loss = self._loss(name, rows[position * size : (position + 1) * size], update)
                self.backward(name, loss)
                losses.append(loss.detach())
        self._micro_step += 1
        if self._micro_step % self.micro_batches_per_step == 0:
            self._end_step()
        return torch.stack(losses).mean()

    def _collect_rows(self, examples: list[dict[str, Any]]) -> dict[str, list[LearnerRow]]:
        """Sampling, verification and exchange: what each learner will train on."""
        with self._phase("sync"):
            self.generation.sync_weights()
        with self._phase("generate"):
            prompt_ids = {name: agent.render([e["prompt"] for e in examples]) for name, agent in self.agents.items()}
            step = self.state.global_step // self.plan.updates
            completions = self._sample(prompt_ids, self.args.num_generations, "train", step)
        with self._phase("verify"):
            texts = {
                name: [self.agents[name].decode(c.ids) for c in of_agent] for name, of_agent in completions.items()
            }
            repeated = [example for example in examples for _ in range(self.args.num_generations)]
            rewards = {
                name: self._verify(name, repeated, completions[name], texts[name], self.metrics) for name in texts
            }
            self._update_capability({name: r.total for name, r in rewards.items()})
        with self._phase("score"):
            own_logps = {name: self._score_own(name, prompt_ids[name], completions[name]) for name in self.agents}
        with self._phase("exchange"):
            rollouts = {
                name: self._rollouts(
                    name, repeated, completions[name], texts[name], rewards[name].total, own_logps[name]
                )
                for name in self.agents
            }
            views = exchange(rollouts, prompt_ids, self.agents, self.args.shares_rollouts)
            advantages = learner_advantages(
                self.args, self.capability, {name: r.total for name, r in rewards.items()}, self.metrics
            )
            rows = {
                learner: {
                    source: [
                        self._row(learner, view, advantage)
                        for view, advantage in zip(of_source, advantages[learner][source].tolist(), strict=True)
                    ]
                    for source, of_source in of_learner.items()
                }
                for learner, of_learner in views.items()
            }
        with self._phase("score"):
            for learner, of_learner in rows.items():
                self._add_log_probabilities(learner, of_learner, own_logps[learner], completions[learner])
        for name in self.agents:
            self.completion_log.add(name, rollouts[name], rewards[name], self.verifier.names, advantages[name][name])
        order, num_generations = self.args.minibatch_order, self.args.num_generations
        return {learner: arrange(of_learner, num_generations, order) for learner, of_learner in rows.items()}

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds to the seconds that a phase of this step took."""
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def _end_step(self):
        self._rows = None
        self.alignment.flush(self.metrics)
        for phase, seconds in self._seconds.items():
            self.metrics.mean(f"time/{phase}", seconds)
        self.metrics.mean("time/step", sum(self._seconds.values()))
        self._seconds.clear()

    # ---- sampling and verification ----------------------------------------------------------------------------------
    def _sample(
        self, prompt_ids: Mapping[str, list[list[int]]], num_generations: int, mode: str, step: int
    ) -> dict[str, list[Completion]]:
        process = self.accelerator.process_index
        return self.generation.generate(
            {
                name: GenerationRequest(ids, num_generations, self.agents[name].sampling_seed(mode, step, process))
                for name, ids in prompt_ids.items()
            }
        )

    def _verify(
        self,
        name: str,
        examples: list[dict[str, Any]],
        completions: list[Completion],
        texts: list[tuple[str, bool]],
        metrics: Metrics,
    ) -> Verdicts:
        """Scores one agent's completions, one example for each, and logs rewards and lengths."""
        prompts = [example["prompt"] for example in examples]
        answers = [
            [{"role": "assistant", "content": text}] if is_conversational({"prompt": prompt}) else text
            for prompt, (text, _) in zip(prompts, texts, strict=True)
        ]
        columns = {key: [example[key] for example in examples] for key in examples[0] if key != "prompt"}
        verdicts = self.verifier(name, prompts, answers, [c.ids for c in completions], columns, self.state)
        log_verdicts(metrics, name, verdicts, self.verifier.names)
        log_completions(metrics, name, completions)
        return verdicts

    def _update_capability(self, rewards: Mapping[str, torch.Tensor]):
        """Appends this step's performance of every agent, over all processes, to its window (Eq. 8)."""
        local = {name: performance_counts(of_agent, self.args.capability_metric) for name, of_agent in rewards.items()}
        everywhere = gather_object([local])
        performances = {}
        for name in self.agents:
            total, count = map(sum, zip(*(of_process[name] for of_process in everywhere), strict=True))
            performances[name] = total / count if count else None
        self.capability.update(performances)
        for name in self.agents:
            if (capability := self.capability.capability(name)) is not None:
                self.metrics.last(f"{name}/capability", capability)
            for peer in self.agents:
                if peer != name and self.args.algorithm == "hacpo":
                    self.metrics.last(f"{name}/capability_ratio/{peer}", self.capability.ratio(name, peer))

    def _score_own(self, name: str, prompt_ids: list[list[int]], completions: list[Completion]) -> list[torch.Tensor]:
        """log π_old of an agent's own answers, token by token."""
        sampled = [None if completion.logps is None else torch.tensor(completion.logps) for completion in completions]
        if self.args.old_logprobs == "sampler":
            return sampled
        prompts = [ids for ids in prompt_ids for _ in range(self.args.num_generations)]
        scored = self._score(name, self.engine(name)[1], prompts, [completion.ids for completion in completions])
        if all(of_sampler is not None for of_sampler in sampled):
            log_sampler_difference(self.metrics, name, torch.cat(scored), torch.cat(sampled))
        return scored

    def _score(self, name: str, model, prompt_ids, completion_ids) -> list[torch.Tensor]:
        self.metrics.total(f"{name}/tokens/scored", sum(map(len, prompt_ids)) + sum(map(len, completion_ids)))
        return score(
            self.accelerators[name],
            model,
            prompt_ids,
            completion_ids,
            self.agents[name].tokenizer.pad_token_id,
            self.args.per_device_train_batch_size,
        )

    def _rollouts(
        self,
        name: str,
        examples: list[dict[str, Any]],
        completions: list[Completion],
        texts: list[tuple[str, bool]],
        rewards: torch.Tensor,
        logps: list[torch.Tensor],
    ) -> list[Rollout]:
        return [
            Rollout(
                agent=name,
                prompt=example["prompt"],
                prompt_index=i // self.args.num_generations,
                completion_ids=completion.ids,
                text=text,
                decodable=decodable,
                finish_reason=completion.finish_reason,
                logprob_sum=float(logp.double().sum()),
                reward=None if reward.isnan() else float(reward),
                policy_version=self.state.global_step,
            )
            for i, (example, completion, (text, decodable), reward, logp) in enumerate(
                zip(examples, completions, texts, rewards, logps, strict=True)
            )
        ]

    # ---- rows -------------------------------------------------------------------------------------------------------
    def _row(self, learner: str, view: LearnerView, advantage: float) -> LearnerRow:
        rollout = view.rollout
        weighted = self.args.algorithm == "hacpo" and self.args.capability_weighting
        reason = view.dropped or ("no_verdict" if rollout.reward is None else None)
        if reason is not None:
            self.metrics.total(f"{learner}/dropped/{reason}", 1)
        return LearnerRow(
            source=rollout.agent,
            prompt_index=rollout.prompt_index,
            prompt_ids=list(view.prompt_ids),
            # A dropped answer may be empty or too long to score: a single token stands in, with no weight in the loss.
            completion_ids=[self.agents[learner].end_of_turn_id] if view.dropped else list(view.completion_ids),
            is_own=rollout.agent == learner,
            in_loss=reason is None,
            is_masked=self.args.mask_truncated_completions and rollout.finish_reason == "length",
            reward=torch.nan if rollout.reward is None else rollout.reward,
            advantage=advantage,
            weight=self.capability.ratio(rollout.agent, learner) if weighted else 1.0,
            old_logprob_sum=rollout.logprob_sum,
            old_num_tokens=rollout.num_tokens,
        )

    def _add_log_probabilities(
        self,
        learner: str,
        rows: dict[str, list[LearnerRow]],
        own_logps: list[torch.Tensor],
        completions: list[Completion],
    ):
        """What some settings want beside the sources' sums: of each token, of the learner, of a reference."""
        _, policy = self.engine(learner)
        if self.args.algorithm == "grpo" or self.args.old_logprobs == "sampler":
            for row, logps in zip(rows[learner], own_logps, strict=True):
                row.old_logps = logps
        if self.args.vllm_importance_sampling_correction:
            for row, logps, completion in zip(rows[learner], own_logps, completions, strict=True):
                row.sampler_weights = sampler_weights(
                    logps,
                    torch.tensor(completion.logps),
                    self.args.vllm_importance_sampling_mode,
                    self.args.vllm_importance_sampling_clip_min,
                    self.args.vllm_importance_sampling_clip_max,
                )
            weights = torch.cat([row.sampler_weights for row in rows[learner]])
            self.metrics.summary(f"{learner}/sampling/importance_sampling_ratio", weights)
        if self.args.algorithm == "naive" and self.args.naive_old_logprobs == "learner":
            peers = [row for source, of_source in rows.items() if source != learner for row in of_source]
            scores = self._score(learner, policy, [r.prompt_ids for r in peers], [r.completion_ids for r in peers])
            for row, logps in zip(peers, scores, strict=True):
                row.old_logprob_sum, row.old_num_tokens = float(logps.double().sum()), len(logps)
        if self.args.beta > 0:
            own = rows[learner]
            reference = self.references.get(learner, policy)
            without_adapter = (
                contextlib.nullcontext()
                if learner in self.references
                else use_adapter(self.agents[learner].policy, None)
            )
            with without_adapter:
                scores = self._score(learner, reference, [r.prompt_ids for r in own], [r.completion_ids for r in own])
            for row, logps in zip(own, scores, strict=True):
                row.ref_logps = logps

    def _count_rows_in_loss(self, rows: dict[str, list[LearnerRow]]) -> dict[str, list[float]]:
        """How many rows the mean of each update runs over, on all processes and accumulation steps together."""
        size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        counts = [
            [sum(row.in_loss for row in of_learner[start : start + size]) for start in range(0, len(of_learner), size)]
            for of_learner in rows.values()
        ]
        total = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), reduction="sum").tolist()
        return dict(zip(rows, total, strict=True))

    # ---- updates ----------------------------------------------------------------------------------------------------
    def _loss(self, name: str, rows: list[LearnerRow], update: int) -> torch.Tensor:
        """Minus the mean objective of an update's rows: this micro-batch's part of it.

        Rows without any gradient, those with advantage 0 above all, are not computed. The mean runs over all rows of
        the update that are in the loss, so the sum is divided by their number, and multiplied by the number of
        processes, over which gradients are averaged. So it does not matter how an update is cut into micro-batches and
        processes.
        """
        agent = self.agents[name]
        moving = [row for row in rows if row.moves_policy]
        # Every process must run a forward and a backward pass, or others would wait for it: a stand-in of weight 0.
        batch = collate(moving or rows[:1], agent.tokenizer.pad_token_id, self.accelerators[name].device)
        with self.compute_loss_context_manager():
            logps, entropies, mask = completion_logps(self.engine(name)[1], batch)
        loss = 0.0 * logps.sum()
        if moving:
            terms = learner_objective(self.args, batch, logps, mask, update)
            loss = -terms.objective.sum()
            log_objective(self.metrics, name, self.args, batch, terms, mask)
            if self.args.old_logprobs == "sampler" and update == 0 and "old_logps" in batch:
                # Before the step's first update the policy is still the one that sampled.
                own = mask & batch["is_own"][:, None]
                log_sampler_difference(self.metrics, name, logps.detach()[own], batch["old_logps"][own])
            self.metrics.mean(f"{name}/entropy", entropies.detach()[mask])
            self.metrics.total(f"{name}/tokens/trained", int(batch["attention_mask"].sum()))
            if self.args.algorithm == "hacpo":
                for row, log_ratio in zip(moving, terms.log_ratio.tolist(), strict=True):
                    if not row.is_own:
                        self.alignment.add(name, row.source, row.prompt_index, log_ratio, row.reward)
        self.metrics.quotient(f"{name}/loss", float(loss.detach()), sum(row.in_loss for row in rows))
        return loss * self.accelerator.num_processes / max(self._rows_in_loss[name][update], 1)

    # ---- logging ----------------------------------------------------------------------------------------------------
    def _get_learning_rate(self) -> float:
        # Trainer asks after the update and before the schedule moves on: the rates that the update was made with.
        self.learning_rates = dict(zip(self.agents, self.lr_scheduler.get_last_lr(), strict=True))
        return max(self.learning_rates.values())

    def log(self, logs: dict[str, float], start_time: float | None = None):
        # The second is the run's last log, for what has come up since the one before.
        if "loss" in logs or "train_runtime" in logs:
            metrics = self.metrics.reduce()
            for name in self.agents:
                for kind in ("generated", "scored", "trained"):
                    key = f"{name}/tokens/{kind}"
                    self.token_totals[key] += metrics.get(key, 0.0)
                    metrics[key] = self.token_totals[key]
            metrics |= {f"{name}/grad_norm": norm for name, norm in self.grad_norms.items()}
            metrics |= {f"{name}/learning_rate": rate for name, rate in self.learning_rates.items()}
            logs.update(metrics)
            self.completion_log.flush(self.state.global_step)
        super().log(logs, start_time)

    # ---- evaluation -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Every agent's mean reward on held-out prompts, `num_generations_eval` sampled answers to each.

        Args:
            eval_dataset: A dataset or a dict of datasets; the trainer's own if None.
            ignore_keys: Unused; Trainer passes it.
            metric_key_prefix: Prefix of all metrics.

        Returns:
            `eval_<agent>/reward` (avg@k) and its parts, `eval_<agent>/best@k` for k > 1 samples, both for each
            `<source>` too if the dataset has a column `source`, and `eval_reward`, the mean over agents.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset.")
        if isinstance(dataset, Mapping):
            metrics = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics

        start_time = time.time()
        training = self.model.training
        self.model.eval()
        self.generation.sync_weights()
        metrics = Metrics()
        num_generations, processes = self.args.num_generations_eval, self.accelerator.num_processes
        # Every process takes as many prompts as the others; those beyond the end repeat the last, and do not count.
        share = range(self.accelerator.process_index, -(-len(dataset) // processes) * processes, processes)
        batch = max(1, self.args.per_device_eval_batch_size // num_generations)
        for start in range(0, len(share), batch):
            indices = share[start : start + batch]
            examples = [dataset[min(index, len(dataset) - 1)] for index in indices]
            prompt_ids = {name: agent.render([e["prompt"] for e in examples]) for name, agent in self.agents.items()}
            completions = self._sample(prompt_ids, num_generations, "eval", start)
            counted = sum(index < len(dataset) for index in indices) * num_generations
            repeated = [example for example in examples for _ in range(num_generations)][:counted]
            for name, of_agent in completions.items() if counted else ():
                texts = [self.agents[name].decode(completion.ids) for completion in of_agent[:counted]]
                verdicts = self._verify(name, repeated, of_agent[:counted], texts, metrics)
                log_evaluation(metrics, name, repeated, verdicts, num_generations)
        self.model.train(training)

        result = metrics.reduce()
        rewards = [result[f"{name}/reward"] for name in self.agents if f"{name}/reward" in result]
        if rewards:
            result["reward"] = sum(rewards) / len(rewards)
        result = {f"{metric_key_prefix}_{name}": value for name, value in result.items()}
        result |= speed_metrics(metric_key_prefix, start_time, num_samples=len(dataset) * num_generations)
        self.log(result)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, result)
        return result

    # ---- checkpoints ------------------------------------------------------------------------------------------------
    def _save_optimizer_and_scheduler(self, output_dir: str):
        super()._save_optimizer_and_scheduler(output_dir)
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            state = {
                "capability_window": self.capability.state_dict(),
                "token_totals": self.token_totals,
                "updates_per_step": self.plan.updates,
                "updates_into_step": self.state.global_step % self.plan.updates,
            }
            (folder / RUN_STATE).write_text(json.dumps(state, indent=2))
        rows = None if self._rows is None else {name: [asdict(r) for r in rows] for name, rows in self._rows.items()}
        state = {"rows": rows, "metrics": self.metrics.state(), "alignment": self.alignment.state()}
        torch.save(state, folder / PROCESS_STATE.format(self.accelerator.process_index))

    def check_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        saved = super().check_checkpoint(checkpoint)
        step = json.loads((Path(checkpoint) / RUN_STATE).read_text())
        processes = self.accelerator.num_processes
        if step["updates_per_step"] != self.plan.updates:
            raise ValueError(
                f"The checkpoint {checkpoint} counts {step['updates_per_step']} updates a step; this run has "
                f"{self.plan.updates}. Choose per_device_train_batch_size and gradient_accumulation_steps such that, "
                f"with {processes} processes, an update takes as many rollouts as before."
            )
        if step["updates_into_step"] and saved["num_processes"] != processes:
            raise ValueError(
                f"The checkpoint {checkpoint} lies {step['updates_into_step']} updates into a step of "
                f"{self.plan.updates}, whose rollouts are spread over {saved['num_processes']} processes; this run "
                f"has {processes}. Resume with {saved['num_processes']} or from a checkpoint between steps."
            )
        return saved

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        super()._load_optimizer_and_scheduler(checkpoint)
        self._micro_step = self.state.global_step * self.args.gradient_accumulation_steps
        self._rows = None
        if checkpoint is None:
            return
        state = json.loads((Path(checkpoint) / RUN_STATE).read_text())
        self.capability.load_state_dict(state["capability_window"])
        self.token_totals.update(state["token_totals"])
        if self.check_checkpoint(checkpoint)["num_processes"] != self.accelerator.num_processes:
            # Between steps: no rows are left to train on, and what was measured since the last log is gone.
            return
        path = Path(checkpoint) / PROCESS_STATE.format(self.accelerator.process_index)
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.metrics.load_state(state["metrics"])
        self.alignment.load_state(state["alignment"])
        if state["rows"] is not None:
            self._rows = {name: [LearnerRow(**row) for row in rows] for name, rows in state["rows"].items()}
            self._rows_in_loss = self._count_rows_in_loss(self._rows)
