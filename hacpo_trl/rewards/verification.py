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
import copy
import inspect
import logging
import math
import numbers as numbers_abc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from datasets import Dataset, Image, IterableDataset
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


logger = logging.getLogger(__name__)

RewardFunction: TypeAlias = Callable[..., Any] | str | PreTrainedModel

# Keyword arguments the trainer fills; a dataset column of the same name would be shadowed.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "agent", "trainer_state", "log_extra", "log_metric")


def check_datasets(
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None,
):
    """Raises if a dataset is none, lacks a prompt, or has columns that reward functions could not be handed."""
    splits = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, Mapping):
        splits |= {f"eval_dataset['{name}']": dataset for name, dataset in eval_dataset.items()}
    else:
        splits["eval_dataset"] = eval_dataset
    for split, dataset in splits.items():
        if dataset is None:
            continue
        if not isinstance(dataset, (Dataset, IterableDataset)):
            raise TypeError(f"{split} must be a datasets.Dataset, not {type(dataset).__name__}.")
        # A stream may not know its columns before it is read.
        columns = dataset.column_names or list(next(iter(dataset), {"prompt": None}))
        images = [column for column in columns if column in ("image", "images")]
        images += [column for column, kind in (dataset.features or {}).items() if isinstance(kind, Image)]
        if images:
            raise ValueError(
                f"{split} has the columns {sorted(set(images))}: agents are language models, and peers could not read "
                "images in each other's answers. Remove the columns."
            )
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
        timeout: Seconds that one call of a function may take; None for no limit.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        timeout: float | None = None,
    ):
        self.timeout = timeout
        self._warned: set[str] = set()
        self.reward_funcs: list[Any] = (
            list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        )
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

    def verify(self, answers: Mapping[str, "Answers"], trainer_state: Any) -> dict[str, Verdicts]:
        """Scores the answers of all agents; what is async runs side by side, of all agents together.

        Args:
            answers: What each agent has answered.
            trainer_state: What reward functions get by this name.
        """
        calls = {}
        for agent, given in answers.items():
            prompts = [example["prompt"] for example in given.examples]
            completions = [
                [{"role": "assistant", "content": text}] if is_conversational({"prompt": prompt}) else text
                for prompt, text in zip(prompts, given.texts, strict=True)
            ]
            columns = [key for key in (given.examples[0] if given.examples else ()) if key != "prompt"]
            calls[agent] = _Call(
                agent,
                {
                    "prompts": prompts,
                    "completions": completions,
                    "completion_ids": [list(ids) for ids in given.completion_ids],
                    **{key: [example[key] for example in given.examples] for key in columns},
                },
            )
        return self._score(calls, trainer_state)

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
        ids = [list(of_completion) for of_completion in completion_ids]
        columns = {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids, **columns}
        return self._score({agent: _Call(agent, columns)}, trainer_state)[agent]

    def _score(self, calls: Mapping[str, "_Call"], trainer_state: Any) -> dict[str, Verdicts]:
        verdicts: dict[tuple[str, int], Any] = {}
        pending: dict[tuple[str, int], Any] = {}
        for agent, call in calls.items():
            for position, function in enumerate(self.reward_funcs):
                arguments = call.arguments(function, trainer_state)
                if is_async_callable(function):
                    pending[agent, position] = function(**arguments)
                else:
                    verdicts[agent, position] = self._run(function, arguments, self.names[position], agent)
        if pending:
            verdicts |= asyncio.run_coroutine_threadsafe(self._gather(pending), self._loop).result()
        return {
            agent: self._verdicts(call, [verdicts[agent, i] for i in range(len(self.names))])
            for agent, call in calls.items()
        }

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any], name: str, agent: str) -> Any:
        """Calls a function that is not async, on a thread of its own if there is a time limit."""
        if self.timeout is None:
            return function(**arguments)
        outcome: Future[Any] = Future()

        def work():
            try:
                outcome.set_result(function(**arguments))
            except BaseException as error:
                outcome.set_exception(error)

        # A daemon: a function that never returns must not keep the program from ending.
        threading.Thread(target=work, name=f"reward {name}", daemon=True).start()
        try:
            return outcome.result(self.timeout)
        except FutureTimeout:
            if outcome.done():
                raise
            raise self._too_slow(name, agent) from None

    async def _gather(self, pending: Mapping[tuple[str, int], Any]) -> dict[tuple[str, int], Any]:
        async def limited(key: tuple[str, int], awaitable: Any) -> Any:
            task = asyncio.ensure_future(awaitable)
            done, _ = await asyncio.wait([task], timeout=self.timeout)
            if not done:
                task.cancel()
                raise self._too_slow(self.names[key[1]], key[0])
            return task.result()

        results = await asyncio.gather(*(limited(key, awaitable) for key, awaitable in pending.items()))
        return dict(zip(pending, results, strict=True))

    def _too_slow(self, name: str, agent: str) -> TimeoutError:
        return TimeoutError(
            f"The reward function '{name}' gave agent '{agent}' no rewards within reward_timeout={self.timeout:g} s."
        )

    def _verdicts(self, call: "_Call", given: Sequence[Any]) -> Verdicts:
        count = len(call.columns["completions"])
        table = [checked_rewards(name, call.agent, v, count) for name, v in zip(self.names, given, strict=True)]
        per_function = torch.tensor(table, dtype=torch.float32).T.reshape(count, len(self.reward_funcs))
        total = (per_function * self.weights).nansum(dim=1)
        if total.isinf().any():
            raise ValueError(
                f"The weighted rewards of agent '{call.agent}' exceed what a float32 holds. Lower reward_weights, or "
                "the rewards themselves."
            )
        no_verdict = per_function.isnan().all(dim=1)
        if no_verdict.any() and call.agent not in self._warned:
            self._warned.add(call.agent)
            first = int(no_verdict.nonzero()[0])
            logger.warning(
                f"Agent '{call.agent}': every reward function returned None for {int(no_verdict.sum())} of {count} "
                f"answers, which count nowhere. The first is {str(call.columns['completions'][first])[:80]!r} to the "
                f"prompt {str(call.columns['prompts'][first])[:80]!r}. Further ones are counted in dropped/no_verdict."
            )
        total = torch.where(no_verdict, torch.nan, total)
        return Verdicts(total, per_function, dict(call.extra), dict(call.metrics))


@dataclass(frozen=True)
class Answers:
    """What one agent has answered, N answers.

    Attributes:
        examples: For each answer the row of the dataset that it answers.
        texts: The answers.
        completion_ids: The answers in the agent's tokens.
    """

    examples: Sequence[dict[str, Any]]
    texts: Sequence[str]
    completion_ids: Sequence[Sequence[int]]


class _Call:
    """The answers of one agent as reward functions get them, and what they log.

    Every function gets lists of its own: one that changes a prompt or a column reaches nobody else.
    """

    def __init__(self, agent: str, columns: dict[str, list]):
        self.agent, self.columns = agent, columns
        self.extra: dict[str, list] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def arguments(self, function: Callable[..., Any], trainer_state: Any) -> dict[str, Any]:
        return {
            **{name: _own_list(values) for name, values in self.columns.items()},
            "trainer_state": trainer_state,
            "log_extra": lambda column, values: self.extra[column].extend(values),
            "log_metric": lambda name, value: self.metrics[name].append(float(value)),
            **({"agent": self.agent} if _takes_agent(function) else {}),
        }


def _own_list(values: Sequence[Any]) -> list[Any]:
    immutable = all(value is None or isinstance(value, (str, int, float)) for value in values)
    return list(values) if immutable else copy.deepcopy(list(values))


def checked_rewards(name: str, agent: str, rewards: Any, expected: int) -> list[float]:
    """What a reward function returned, as numbers; NaN for no verdict.

    Raises:
        TypeError: if it is no list of numbers and None, naming function, agent and what it is instead.
        ValueError: if there are too few or too many, or one is beyond what a float32 holds.
    """
    whose = f"The reward function '{name}' returned for agent '{agent}'"
    wanted = f"a list of {expected} numbers, None where there is no verdict"
    if inspect.isawaitable(rewards):
        if inspect.iscoroutine(rewards):
            rewards.close()
        raise TypeError(f"{whose} a coroutine that nothing awaits, not {wanted}. Declare the function `async def`.")
    if isinstance(rewards, (str, bytes, Mapping, set)) or not isinstance(rewards, Iterable):
        raise TypeError(f"{whose} {_kind(rewards)}, not {wanted}.")
    if (dimensions := getattr(rewards, "ndim", 1)) != 1:
        raise TypeError(f"{whose} {_kind(rewards)} of {dimensions} dimensions, not {wanted}.")
    rewards = list(rewards)
    if len(rewards) != expected:
        raise ValueError(
            f"The reward function '{name}' returned {len(rewards)} rewards for {expected} completions of agent "
            f"'{agent}'. It must return one for each, None where it has no verdict."
        )
    numbers = []
    for position, reward in enumerate(rewards):
        is_number = isinstance(reward, numbers_abc.Number) or getattr(reward, "ndim", None) == 0
        if reward is not None and (not is_number or isinstance(reward, complex)):
            raise TypeError(f"{whose} {_kind(reward)} as number {position} of its rewards, not {wanted}.")
        numbers.append(torch.nan if reward is None else float(reward))
        if abs(numbers[-1]) > torch.finfo(torch.float32).max:
            what = "an infinite reward" if math.isinf(numbers[-1]) else f"{numbers[-1]:g}, which no float32 holds,"
            raise ValueError(f"The reward function '{name}' returned {what} for agent '{agent}'. Scale its rewards.")
    return numbers


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:60]!r})"


def _takes_agent(function: Callable[..., Any]) -> bool:
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
