"""HACPOTrainer: N language models learn together from each other's rollouts (arXiv 2603.02604, Algorithm 1).

One step, on every process for its share of the prompts:

    1. sample      every agent answers the same prompts                     generation/
    2. verify      every answer is scored once                              rewards/verification.py
       capability  windows and ratios ω                                     algorithm/capability.py
       score       log π_old of every agent's own answers                   backends/scorer.py
    3. exchange    every learner gets every answer, in its own tokens       rollouts/
       advantages  with the capability-aware baseline                       learner.py, algorithm/advantages.py
    4. update      U optimizer updates of every agent                       learner.py, algorithm/sharing/, backends/

Everything that needs a policy's weights before the updates happens before the first backward pass, and nothing that
one agent does depends on the order in which agents are listed.

A checkpoint may fall between the updates of a step; it then holds the rest of the step's rows, and the resumed run
continues where it was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl.trainer.utils import disable_dropout_in_model, identity

from .algorithm.alignment import Alignment
from .algorithm.capability import CapabilityWindow
from .backends.finite import FiniteUpdates
from .backends.log_probabilities import completion_logps, prepare_policy
from .backends.scorer import Scorer
from .config import HACPOConfig
from .evaluation.during_training import evaluate_agents, named_dataset
from .generation.backend import Completion, GenerationBackend, log_completions, requests_for
from .generation.choice import generation_backend as chosen_backend
from .learner import (
    add_byte_lengths,
    learner_advantages,
    learner_objective,
    log_dropped,
    log_objective,
    log_sampler_difference,
    update_capability,
)
from .loading import build_agents, initial_policies, warn_of_dropout
from .prompts import fits_all, training_prompts, usable_prompts
from .reporting.metrics import Metrics
from .reporting.terminal import RewardTableCallback
from .reporting.timing import Stopwatch, timed
from .rewards.verification import Answers, RewardFunction, Verdicts, Verifier, check_datasets, log_verdicts
from .rollouts.completions import CompletionLog
from .rollouts.exchange import exchange
from .rollouts.rollout import LearnerView, Rollout
from .rollouts.rows import LearnerRow, StepSampler, arrange, collate, learner_row, prompts_per_update, step_layout
from .rollouts.stream import stream_of_steps


class HACPOTrainer(FiniteUpdates):
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
        reward_funcs: One reward function or several; see `hacpo_trl.rewards.verification`. A sequence classification
            model, or the id of one, is a reward model, as in TRL.
        args: The settings.
        train_dataset: Prompts, plain or conversational, in a column `prompt`. Those too long for one agent are left
            out for all. A stream (`IterableDataset`) needs `max_steps`, and is shuffled in a buffer.
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
        train_dataset: Dataset | IterableDataset | None = None,
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
        self.verifier = Verifier(reward_funcs, args.reward_weights, reward_processing_classes, args.reward_timeout)
        check_datasets(train_dataset, eval_dataset)
        agents = build_agents(models, args, processing_classes or {}, peft_configs or {})
        self.plan = args.step_plan(len(agents))
        train_dataset = training_prompts(train_dataset, agents, args, self.plan)
        eval_dataset = usable_prompts(eval_dataset, agents)
        self.micro_batches_per_step = self.plan.updates * args.gradient_accumulation_steps
        self.prompts_per_update = prompts_per_update(self.plan, args.num_generations, args.minibatch_order)
        # Copied before training or resuming moves the policies.
        references = initial_policies(agents, args)
        for name, reference in references.items():
            prepare_policy(reference, agents[name].temperature)
        for agent in agents.values():
            prepare_policy(agent.policy, agent.temperature)
            if args.disable_dropout:
                disable_dropout_in_model(agent.policy)
            else:
                warn_of_dropout(agent)
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

        self.generation = generation_backend or chosen_backend(
            self.agents, self.engine, args, lambda: self.weights_version
        )
        self.capability = CapabilityWindow(list(self.agents), args.capability_window)
        self.metrics = Metrics()
        self.alignment = Alignment()
        self.token_totals: dict[str, float] = defaultdict(float)
        self.completion_log = CompletionLog(args)
        # Of the last update; empty before the first.
        self.grad_norms: dict[str, float] = {}
        self.learning_rates: dict[str, float] = {}
        self.scorer = Scorer(self.agents, self.engine, self.references, args, self.metrics)
        self.stopwatch = Stopwatch()

    # ---- data -------------------------------------------------------------------------------------------------------
    def get_train_dataloader(self):
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            layout = step_layout(self.plan.prompts, self.prompts_per_update, self.accelerator.num_processes)
            fits, seed = fits_all(self.agents), self.args.order_seed
            dataset = stream_of_steps(dataset, layout, self.micro_batches_per_step, seed, fits)
        return self._get_dataloader(
            dataset=dataset,
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
            prompts_per_update=self.prompts_per_update,
            num_processes=self.accelerator.num_processes,
            seed=self.args.order_seed,
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
        if self._rows_in_loss is None:
            self._rows_in_loss = self._count_rows_in_loss(self._rows)
        loss = self._update(position)
        self._micro_step += 1
        if self._micro_step % self.micro_batches_per_step == 0:
            self._rows = self._rows_in_loss = None
            self.alignment.flush(self.metrics)
            self.stopwatch.flush(self.metrics)
        return loss

    def _collect_rows(self, examples: list[dict[str, Any]]) -> dict[str, list[LearnerRow]]:
        """Algorithm 1 up to the updates: from a step's prompts to the rows that each learner trains on."""
        self._sync_weights()
        # Every agent answers the same prompts, and every answer is verified once.
        prompt_ids, completions = self._sample(examples)
        texts, verdicts = self._verify(examples, completions)
        self._update_capability(verdicts)  # Eq. 8, 9
        # Every learner gets every rollout, with log π_old of its source, in its own tokens.
        logps = self._score(prompt_ids, completions)
        rollouts = self._rollouts(examples, completions, texts, verdicts, logps)
        views = self._exchange(rollouts, prompt_ids)
        advantages = self._advantages(rollouts, verdicts)  # Eq. 6, 7
        return self._rows_of(views, advantages, logps, completions)  # Eq. 10, and the order of updates

    # ---- sampling and verification ----------------------------------------------------------------------------------
    @timed("sync")
    def _sync_weights(self):
        self.generation.sync_weights()

    @timed("generate")
    def _sample(
        self, examples: list[dict[str, Any]]
    ) -> tuple[dict[str, list[list[int]]], dict[str, list[Completion]]]:
        """The prompts in each agent's tokens, and its answers to them."""
        prompts = [example["prompt"] for example in examples]
        prompt_ids = {name: agent.render(prompts) for name, agent in self.agents.items()}
        step, process = self.state.global_step // self.plan.updates, self.accelerator.process_index
        requests = requests_for(self.agents, prompt_ids, self.args.num_generations, "train", step, process)
        return prompt_ids, self.generation.generate(requests)

    @timed("verify")
    def _verify(
        self, examples: list[dict[str, Any]], completions: Mapping[str, list[Completion]]
    ) -> tuple[dict[str, list[tuple[str, bool]]], dict[str, Verdicts]]:
        """The answers as text (and whether it stands for them), and the verdicts on them."""
        answered = [example for example in examples for _ in range(self.args.num_generations)]
        texts, answers = {}, {}
        for name, of_agent in completions.items():
            agent, ids = self.agents[name], [completion.ids for completion in of_agent]
            texts[name] = [agent.decode(of_completion) for of_completion in ids]
            answers[name] = Answers(answered, [agent.text_for_rewards(of_completion) for of_completion in ids], ids)
            log_completions(self.metrics, name, of_agent)
        verdicts = self.verifier.verify(answers, self.state)
        for name in verdicts:
            log_verdicts(self.metrics, name, verdicts[name], self.verifier.names)
        return texts, verdicts

    @timed("verify")
    def _update_capability(self, verdicts: Mapping[str, Verdicts]):
        update_capability(self.args, self.capability, _rewards(verdicts), self.metrics)

    @timed("score")
    def _score(
        self, prompt_ids: Mapping[str, list[list[int]]], completions: Mapping[str, list[Completion]]
    ) -> dict[str, list[torch.Tensor]]:
        """log π_old of every agent's own answers, token by token."""
        return {
            name: self.scorer.old_logps(name, prompt_ids[name], of_agent) for name, of_agent in completions.items()
        }

    # ---- exchange ---------------------------------------------------------------------------------------------------
    @timed("exchange")
    def _rollouts(
        self,
        examples: list[dict[str, Any]],
        completions: Mapping[str, list[Completion]],
        texts: Mapping[str, list[tuple[str, bool]]],
        verdicts: Mapping[str, Verdicts],
        logps: Mapping[str, list[torch.Tensor]],
    ) -> dict[str, list[Rollout]]:
        """What every agent gives to the others."""
        return {
            name: [
                Rollout(
                    agent=name,
                    prompt=examples[i // self.args.num_generations]["prompt"],
                    prompt_index=i // self.args.num_generations,
                    completion_ids=completion.ids,
                    text=text,
                    decodable=decodable,
                    finish_reason=completion.finish_reason,
                    logprob_sum=float(of_tokens.double().sum()),
                    reward=None if reward.isnan() else float(reward),
                    policy_version=self.state.global_step,
                )
                for i, (completion, (text, decodable), reward, of_tokens) in enumerate(
                    zip(completions[name], texts[name], verdicts[name].total, logps[name], strict=True)
                )
            ]
            for name in self.agents
        }

    @timed("exchange")
    def _exchange(
        self, rollouts: Mapping[str, list[Rollout]], prompt_ids: Mapping[str, list[list[int]]]
    ) -> dict[str, dict[str, list[LearnerView]]]:
        return exchange(rollouts, prompt_ids, self.agents, self.args.shares_rollouts)

    @timed("exchange")
    def _advantages(
        self, rollouts: Mapping[str, list[Rollout]], verdicts: Mapping[str, Verdicts]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Of every rollout, by learner and source."""
        advantages = learner_advantages(self.args, self.capability, _rewards(verdicts), self.metrics)
        for name in self.agents:
            self.completion_log.add(name, rollouts[name], verdicts[name], self.verifier.names, advantages[name][name])
        return advantages

    def _rows_of(
        self,
        views: Mapping[str, Mapping[str, list[LearnerView]]],
        advantages: Mapping[str, Mapping[str, torch.Tensor]],
        logps: Mapping[str, list[torch.Tensor]],
        completions: Mapping[str, list[Completion]],
    ) -> dict[str, list[LearnerRow]]:
        """Every learner's rows in the order in which updates consume them."""
        arranged = {}
        for learner in views:
            rows = self._weighted_rows(learner, views[learner], advantages[learner])
            self._add_log_probabilities(learner, rows, logps[learner], completions[learner])
            arranged[learner] = arrange(rows, self.args.num_generations, self.args.minibatch_order)
        return arranged

    @timed("exchange")
    def _weighted_rows(
        self, learner: str, views: Mapping[str, list[LearnerView]], advantages: Mapping[str, torch.Tensor]
    ) -> dict[str, list[LearnerRow]]:
        """One learner's rows by source, a peer's with its weight."""
        stand_in, masked = self.agents[learner].end_of_turn_id, self.args.mask_truncated_completions
        rows = {}
        for source, of_source in views.items():
            weight = self.args.rule.weight(self.capability.ratio(source, learner))
            rows[source] = [
                learner_row(learner, view, advantage, weight, stand_in, masked)
                for view, advantage in zip(of_source, advantages[source].tolist(), strict=True)
            ]
        log_dropped(self.metrics, learner, views)
        if self.args.ratio_normalization == "bytes":
            add_byte_lengths(learner, views, rows, self.metrics)
        return rows

    @timed("score")
    def _add_log_probabilities(
        self,
        learner: str,
        rows: Mapping[str, list[LearnerRow]],
        own_logps: list[torch.Tensor],
        completions: list[Completion],
    ):
        self.scorer.add_log_probabilities(learner, rows, own_logps, completions)

    # ---- updates ----------------------------------------------------------------------------------------------------
    def _count_rows_in_loss(self, rows: Mapping[str, list[LearnerRow]]) -> dict[str, list[float]]:
        """How many rows the mean of each update runs over, on all processes and accumulation steps together."""
        size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        counts = [
            [sum(row.in_loss for row in of_learner[start : start + size]) for start in range(0, len(of_learner), size)]
            for of_learner in rows.values()
        ]
        total = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), reduction="sum").tolist()
        return dict(zip(rows, total, strict=True))

    @timed("update")
    def _update(self, position: int) -> torch.Tensor:
        """Forward and backward passes of all agents on one micro-batch of the step; their mean loss."""
        update = position // self.args.gradient_accumulation_steps
        size, losses = self.args.per_device_train_batch_size, []
        for name, rows in self._rows.items():
            of_batch = rows[position * size : (position + 1) * size]
            loss = self._loss(name, of_batch, update)
            self.watched_backward(name, loss, of_batch)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

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
            if self.args.old_logprobs == "sampler" and "old_logps" in batch:
                own = mask & batch["is_own"][:, None]
                self.metrics.mean(f"{name}/entropy", entropies.detach()[own])
                if update == 0:  # the policy is still the one that sampled
                    log_sampler_difference(self.metrics, name, logps.detach()[own], batch["old_logps"][own])
            self.metrics.total(f"{name}/tokens/trained", int(batch["attention_mask"].sum()))
            if self.args.rule.uses_capability:
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
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Every agent's mean reward on held-out prompts, `num_generations_eval` sampled answers to each.

        Args:
            eval_dataset: A dataset or a dict of datasets; the trainer's own if None, or the one of this name.
            ignore_keys: Unused; Trainer passes it.
            metric_key_prefix: Prefix of all metrics.

        Returns:
            `eval_<agent>/reward` (avg@k) and its parts, `eval_<agent>/best@k` for k > 1 samples, both for each
            `<source>` too if the dataset has a column `source`, and `eval_reward`, the mean over agents.
        """
        if eval_dataset is None or isinstance(eval_dataset, str):
            dataset, metric_key_prefix = named_dataset(self.eval_dataset, eval_dataset, metric_key_prefix)
        else:
            check_datasets(None, eval_dataset)
            dataset = usable_prompts(eval_dataset, self.agents)
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        training = self.model.training
        self.model.eval()
        result = evaluate_agents(
            self.agents, self.generation, self.verifier, dataset, self.args, self.accelerator, self.state
        )
        self.model.train(training)
        result = {f"{metric_key_prefix}_{name}": value for name, value in result.items()}
        self.log(result)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, result)
        return result


def _rewards(verdicts: Mapping[str, Verdicts]) -> dict[str, torch.Tensor]:
    """`(B·G,)` of each agent, NaN for no verdict."""
    return {name: of_agent.total for name, of_agent in verdicts.items()}
