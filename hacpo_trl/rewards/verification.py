"""Verification: reward functions called as TRL calls them, each rollout once.

    def reward(prompts, completions, completion_ids, agent, trainer_state, log_extra, log_metric, **columns):
        return [1.0, None, ...]     # one verdict a completion; None: no verdict

`columns` are the further columns of the dataset. As in TRL, all of them are passed, and `trainer_state`,
`log_extra(column, values)` and `log_metric(name, value)` besides: `**kwargs` takes those that a function has no use
for. `agent` names the agent that sampled the completions, and is passed only if the function takes it. A function may
be async; then those of one call run side by side.
"""

import asyncio
import atexit
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.data_utils import is_conversational
from trl.trainer.utils import (
    get_callable_name,
    is_async_callable,
    shutdown_event_loop_in_daemon,
    start_event_loop_in_daemon,
)

from ..reporting.metrics import Metrics
from .reward_model import RewardModel


RewardFunction = Callable[..., Any] | str | PreTrainedModel

# Keyword arguments the trainer fills; a dataset column of the same name would be shadowed.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "agent", "trainer_state", "log_extra", "log_metric")


def check_datasets(train_dataset: Dataset | None, eval_dataset: Dataset | Mapping[str, Dataset] | None):
    """Raises if a dataset is none, lacks a prompt, or has columns that reward functions could not be handed."""
    splits = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, Mapping):
        splits |= {f"eval_dataset['{name}']": dataset for name, dataset in eval_dataset.items()}
    else:
        splits["eval_dataset"] = eval_dataset
    for split, dataset in splits.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset):
            raise TypeError(f"{split} must be a datasets.Dataset, not {type(dataset).__name__}.")
        columns = dataset.column_names
        if "prompt" not in columns:
            raise ValueError(f"{split} needs a column 'prompt'; it has {sorted(columns)}.")
        shadowed = [column for column in columns if column in RESERVED_COLUMNS]
        if shadowed:
            raise ValueError(
                f"{split} has the columns {shadowed}, but reward functions get arguments of these names from the "
                "trainer. Rename the columns."
            )


@dataclass(frozen=True)
class Verdicts:
    """What the reward functions said of N completions of one agent.

    Attributes:
        total: `(N,)` float32, the weighted sum over functions; NaN where none gave a verdict.
        per_function: `(N, F)` float32, NaN for "no verdict".
        extra: Columns that functions added by `log_extra`.
        metrics: Numbers that functions added by `log_metric`.
    """

    total: torch.Tensor
    per_function: torch.Tensor
    extra: dict[str, list]
    metrics: dict[str, list[float]]


class Verifier:
    """The reward functions of a run and their weights.

    Args:
        reward_funcs: One reward function or several. A sequence classification model, or its id, is a reward model.
        weights: A weight for each; 1 for each if None.
        tokenizers: For each the tokenizer of a reward model; None loads it from where the model came from.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    ):
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not self.reward_funcs:
            raise ValueError("reward_funcs is empty: give at least one reward function.")
        if not isinstance(tokenizers, (list, tuple)):
            tokenizers = [tokenizers] * len(self.reward_funcs)
        if len(tokenizers) != len(self.reward_funcs):
            raise ValueError(
                f"reward_processing_classes has {len(tokenizers)} entries for {len(self.reward_funcs)} reward "
                "functions."
            )
        for position, (function, tokenizer) in enumerate(zip(self.reward_funcs, tokenizers, strict=True)):
            if isinstance(function, (str, PreTrainedModel)):
                self.reward_funcs[position] = RewardModel(function, tokenizer)
            elif not callable(function) or isinstance(function, torch.nn.Module):
                raise TypeError(
                    "reward_funcs must be functions, sequence classification models or their ids, but one is "
                    f"{function!r} ({type(function).__name__})."
                )
        self.names = [get_callable_name(function) for function in self.reward_funcs]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"Two reward functions share a name: {self.names}. Metrics could not tell them apart.")
        if weights is not None and len(weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(weights)} weights for {len(self.reward_funcs)} reward functions "
                f"({self.names})."
            )
        self.weights = torch.tensor([1.0] * len(self.reward_funcs) if weights is None else list(weights))
        self._loop = None
        if any(is_async_callable(function) for function in self.reward_funcs):
            # A loop on a thread of its own works inside notebooks, too, where the main thread already runs one.
            thread, self._loop, ready = start_event_loop_in_daemon(name="hacpo-rewards")
            ready.wait()
            atexit.register(shutdown_event_loop_in_daemon, thread, self._loop)

    def verify(
        self,
        agent: str,
        examples: Sequence[dict[str, Any]],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        trainer_state: Any,
    ) -> Verdicts:
        """Scores N answers of one agent.

        Args:
            agent: The agent's name.
            examples: For each answer the row of the dataset that it answers.
            texts: The answers.
            completion_ids: The answers in the agent's tokens.
            trainer_state: What reward functions get by this name.
        """
        prompts = [example["prompt"] for example in examples]
        answers = [
            [{"role": "assistant", "content": text}] if is_conversational({"prompt": prompt}) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {key: [example[key] for example in examples] for key in examples[0] if key != "prompt"}
        return self(agent, prompts, answers, completion_ids, columns, trainer_state)

    def __call__(
        self,
        agent: str,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list],
        trainer_state: Any,
    ) -> Verdicts:
        """Scores N completions of one agent. `columns`: the dataset's further columns, N values each."""
        extra: dict[str, list] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        arguments = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": trainer_state,
            "log_extra": lambda column, values: extra[column].extend(values),
            "log_metric": lambda name, value: metrics[name].append(float(value)),
            **columns,
        }
        verdicts: list[Any] = [None] * len(self.reward_funcs)
        pending = {}
        for position, function in enumerate(self.reward_funcs):
            result = function(**arguments, **({"agent": agent} if _takes_agent(function) else {}))
            if is_async_callable(function):
                pending[position] = result
            else:
                verdicts[position] = result
        if pending:
            awaited = asyncio.run_coroutine_threadsafe(_gather(list(pending.values())), self._loop).result()
            for position, result in zip(pending, awaited, strict=True):
                verdicts[position] = result
        table = [self._checked(name, agent, v, len(completions)) for name, v in zip(self.names, verdicts, strict=True)]
        per_function = torch.tensor(table, dtype=torch.float32).T.reshape(len(completions), len(self.reward_funcs))
        total = (per_function * self.weights).nansum(dim=1)
        total = torch.where(per_function.isnan().all(dim=1), torch.nan, total)
        return Verdicts(total, per_function, dict(extra), dict(metrics))

    def _checked(self, name: str, agent: str, verdicts: Any, expected: int) -> list[float]:
        if verdicts is None:
            raise TypeError(f"The reward function '{name}' returned None for agent '{agent}', not a list of rewards.")
        verdicts = list(verdicts)
        if len(verdicts) != expected:
            raise ValueError(
                f"The reward function '{name}' returned {len(verdicts)} rewards for {expected} completions of agent "
                f"'{agent}'. It must return one for each, None where it has no verdict."
            )
        numbers = [torch.nan if verdict is None else float(verdict) for verdict in verdicts]
        if any(number in (float("inf"), float("-inf")) for number in numbers):
            raise ValueError(f"The reward function '{name}' returned an infinite reward for agent '{agent}'.")
        return numbers


async def _gather(coroutines):
    return await asyncio.gather(*coroutines)


def _takes_agent(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "agent" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def log_verdicts(metrics: Metrics, agent: str, verdicts: Verdicts, functions: Sequence[str]):
    """Logs one agent's rewards, in all and by function, and what the functions logged themselves."""
    metrics.mean(f"{agent}/reward", verdicts.total[~verdicts.total.isnan()])
    metrics.std(f"{agent}/reward_std", verdicts.total[~verdicts.total.isnan()])
    for function, values in zip(functions, verdicts.per_function.T, strict=True):
        metrics.mean(f"{agent}/rewards/{function}/mean", values[~values.isnan()])
        metrics.std(f"{agent}/rewards/{function}/std", values[~values.isnan()])
    for name, numbers in verdicts.metrics.items():
        metrics.mean(f"{agent}/{name}", torch.tensor(numbers))


def log_evaluation(
    metrics: Metrics, agent: str, examples: Sequence[dict[str, Any]], verdicts: Verdicts, num_generations: int
):
    """Logs what evaluation adds to `log_verdicts`: best@k, and the rewards of each value of the column `source`.

    Args:
        metrics: Where to log.
        agent: The agent's name.
        examples: One for each completion, `num_generations` in a row for each prompt.
        verdicts: The verdicts on the completions.
        num_generations: k, samples of each prompt.
    """
    best = verdicts.total.nan_to_num(-torch.inf).view(-1, num_generations).amax(-1)
    sources = [str(example["source"]) if "source" in example else None for example in examples]
    for source in [None, *sorted({source for source in sources if source is not None})]:
        chosen = torch.tensor([source is None or s == source for s in sources])
        suffix = "" if source is None else f"/{source}"
        if source is not None:
            of_source = verdicts.total[chosen]
            metrics.mean(f"{agent}/reward{suffix}", of_source[~of_source.isnan()])
        if num_generations > 1:
            of_prompts = best[chosen.view(-1, num_generations)[:, 0]]
            metrics.mean(f"{agent}/best@{num_generations}{suffix}", of_prompts[of_prompts.isfinite()])
