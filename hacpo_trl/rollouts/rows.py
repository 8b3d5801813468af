"""Prompts of a step, and the rows that learners train on."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from ..options.step import StepPlan
from .rollout import LearnerView


def step_layout(prompts_per_step: int, prompts_per_update: float, num_processes: int) -> list[int]:
    """The order in which a step's prompts are dealt to processes, each of which gets a consecutive share.

    Each update then holds the same prompts over all processes however many there are, wherever an update holds whole
    prompts on each process.
    """
    share = prompts_per_update / num_processes
    positions = torch.arange(prompts_per_step)
    if share.is_integer():
        # An update may end in the middle of one source's rows (self_first): every update ends at a block's end.
        block = math.gcd(int(share), prompts_per_step // num_processes)
        positions = positions.view(-1, num_processes, block).transpose(0, 1).reshape(-1)
    return positions.tolist()


class StepSampler(Sampler[int]):
    """Draws the prompts of each step, and repeats them for every micro-batch of the step's updates.

    Trainer's loop asks for a batch for every micro-batch, while a step samples its prompts once; so the same prompts
    come up again until the step is done, as in TRL. A last step that is not full is left out.

    Processes get consecutive shares of a step's prompts, laid out by `step_layout`.

    Args:
        num_prompts: Size of the dataset.
        prompts_per_step: B, over all processes.
        repeats: Micro-batches of a step.
        prompts_per_update: Prompts that one update takes its rollouts from, over all processes.
        num_processes: Processes.
        seed: Seed of the shuffling; None keeps the order of the dataset.
        epoch: Tells the current epoch. Every epoch has an order of its own, which depends on nothing else, so that a
            resumed run finds its place.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_step: int,
        repeats: int,
        prompts_per_update: float,
        num_processes: int,
        seed: int | None,
        epoch: Callable[[], int],
    ):
        self.num_prompts, self.prompts_per_step, self.repeats = num_prompts, prompts_per_step, repeats
        self.seed, self.epoch = seed, epoch
        self._layout = step_layout(prompts_per_step, prompts_per_update, num_processes)

    def __iter__(self) -> Iterator[int]:
        if self.seed is None:
            order = list(range(self.num_prompts))
        else:
            generator = torch.Generator().manual_seed(self.seed + self.epoch())
            order = torch.randperm(self.num_prompts, generator=generator).tolist()
        for start in range(0, self.num_prompts - self.prompts_per_step + 1, self.prompts_per_step):
            chunk = order[start : start + self.prompts_per_step]
            for _ in range(self.repeats):
                yield from (chunk[position] for position in self._layout)

    def __len__(self) -> int:
        return self.num_prompts // self.prompts_per_step * self.prompts_per_step * self.repeats


@dataclass
class LearnerRow:
    """One rollout as one learner trains on it.

    Attributes:
        source: The agent that sampled it.
        prompt_index: Which prompt of this process it answers.
        prompt_ids: The prompt, in the learner's tokens.
        completion_ids: The answer, in the learner's tokens.
        is_own: Whether the learner sampled it itself.
        in_loss: Whether it counts in the mean of the loss; False for rollouts without a verdict and for dropped ones.
        is_masked: Counts in the mean, but with objective 0 (`mask_truncated_completions`).
        reward: The verdict, NaN if there is none.
        advantage: A.
        weight: ω^(j,k) of a peer's rollout, 1 of an own one.
        old_logprob_sum: log π_old(y) in nats: the source's, or the learner's where the algorithm recomputes it.
        old_num_tokens: The number of tokens that sum runs over.
        byte_length: The text's UTF-8 bytes over the learner's mean bytes a token, for `ratio_normalization="bytes"`.
        old_logps: `(T,)`, the terms of that sum, for token-level ratios.
        ref_logps: `(T,)`, log-probabilities under the initial policy, for the KL term.
        sampler_weights: `(T,)`, what the objective of each token is weighed by where the trainer's probabilities are
            not the sampler's (`vllm_importance_sampling_correction`).
    """

    source: str
    prompt_index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    is_own: bool
    in_loss: bool
    is_masked: bool
    reward: float
    advantage: float
    weight: float
    old_logprob_sum: float
    old_num_tokens: int
    byte_length: float = 0.0
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampler_weights: torch.Tensor | None = None

    @property
    def moves_policy(self) -> bool:
        """Whether the row has any gradient; one that has none need not be computed."""
        has_gradient = self.advantage != 0 or self.ref_logps is not None
        return self.in_loss and not self.is_masked and has_gradient


def learner_row(
    learner: str, view: LearnerView, advantage: float, weight: float, stand_in: int, mask_truncated: bool
) -> LearnerRow:
    """A rollout as its learner trains on it.

    Args:
        learner: The learner's name.
        view: The rollout in its tokens.
        advantage: A, in the eyes of whom `cross_advantage` says.
        weight: ω^(j,k) of a peer's rollout, 1 of an own one.
        stand_in: A token of the learner. It stands in for an answer that was dropped, which may be empty or too long
            to score, with no weight in the loss.
        mask_truncated: Whether answers cut by length get objective 0.
    """
    rollout = view.rollout
    return LearnerRow(
        source=rollout.agent,
        prompt_index=rollout.prompt_index,
        prompt_ids=list(view.prompt_ids),
        completion_ids=[stand_in] if view.dropped else list(view.completion_ids),
        is_own=rollout.agent == learner,
        in_loss=view.unusable is None,
        is_masked=mask_truncated and rollout.finish_reason == "length",
        reward=math.nan if rollout.reward is None else rollout.reward,
        advantage=advantage,
        weight=weight,
        old_logprob_sum=rollout.logprob_sum,
        old_num_tokens=rollout.num_tokens,
    )


def arrange(rows: dict[str, list[LearnerRow]], num_generations: int, order: str) -> list[LearnerRow]:
    """Puts a step's rows into the order in which updates consume them.

    Args:
        rows: For each source its rows, prompt by prompt; the learner's own first.
        num_generations: G.
        order: `"mixed"` interleaves the sources of each prompt, so that every update holds own and peers' rollouts of
            the same prompts (Eq. 53); `"self_first"` takes one source after the other.
    """
    sources = list(rows.values())
    if order == "self_first":
        return [row for source in sources for row in source]
    assert all(len(source) == len(sources[0]) and len(source) % num_generations == 0 for source in sources)
    return [row for turn in zip(*sources, strict=True) for row in turn]


def prompts_per_update(plan: StepPlan, num_generations: int, order: str) -> float:
    """How many prompts one update draws on, over all processes."""
    return plan.rows_per_update / (num_generations if order == "self_first" else plan.rows_per_prompt)


def pad_sequences(
    prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Prompts and answers as right-padded tensors.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each `(R, L)`; labels are -100 off the answers.
    """
    sequences = [torch.tensor([*p, *c]) for p, c in zip(prompt_ids, completion_ids, strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_token_id)
    starts = torch.tensor([len(ids) for ids in prompt_ids])[:, None]
    ends = torch.tensor([len(sequence) for sequence in sequences])[:, None]
    positions = torch.arange(input_ids.shape[1])
    in_answer = (positions >= starts) & (positions < ends)
    return {
        "input_ids": input_ids,
        "attention_mask": (positions < ends).long(),
        "labels": input_ids.masked_fill(~in_answer, -100),
    }


def collate(rows: Sequence[LearnerRow], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows as tensors.

    Returns:
        What `pad_sequences` returns; `old_logps` and `ref_logps` (0 where a row has none) and `sampler_weights` (1),
        `(R, L - 1)`, if any row has them, aligned with the predictions of `labels[:, 1:]`; and `(R,)` tensors of the
        rows' numbers and flags.
    """
    batch = pad_sequences([row.prompt_ids for row in rows], [row.completion_ids for row in rows], pad_token_id)
    predicted = batch["labels"][:, 1:] != -100
    for name, missing in (("old_logps", 0.0), ("ref_logps", 0.0), ("sampler_weights", 1.0)):
        if any(getattr(row, name) is not None for row in rows):
            batch[name] = torch.full(predicted.shape, missing)
            for padded, mask, row in zip(batch[name], predicted, rows, strict=True):
                if getattr(row, name) is not None:
                    padded[mask] = getattr(row, name)
    for name in ("is_own", "in_loss"):
        batch[name] = torch.tensor([getattr(row, name) for row in rows])
    for name in ("reward", "advantage", "weight", "old_logprob_sum", "old_num_tokens", "byte_length"):
        batch[name] = torch.tensor([float(getattr(row, name)) for row in rows])
    return {name: tensor.to(device) for name, tensor in batch.items()}
