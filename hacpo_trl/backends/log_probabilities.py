"""Log-probabilities of answers under a policy, at the agent's sampling temperature.

The language-model head is TRL's fused one: it never materializes the logits of a whole batch.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from ..rollouts.rows import pad_sequences


def prepare_policy(policy: PreTrainedModel, temperature: float):
    """Teaches a policy to return log-probabilities and entropies; `generate` and saving stay as they are."""
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    add_fused_lm_head(base, temperature=temperature, outputs=("log_probs", "entropy"))


def completion_logps(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the answers' tokens.

    Args:
        model: A policy, wrapped or not, that went through `prepare_policy`.
        batch: `input_ids`, `attention_mask`, `labels`: `(R, L)`, right-padded.

    Returns:
        Log-probabilities in nats, entropies in nats, and a bool mask of the answers' tokens, each `(R, L - 1)`: entry
        t is about token t + 1. Off the mask, the first two are 0.
    """
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
        fused_lm_head=True,
    )
    return output.log_probs.float(), output.entropy.float(), batch["labels"][:, 1:] != -100


@torch.no_grad()
def score_with_entropies(
    accelerator: Accelerator,
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    pad_token_id: int,
    batch_size: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The log-probabilities and the entropies of each answer's tokens, in nats, on the CPU: `(T,)` tensors.

    Answers of like length share a batch, which saves padding. Every process must score the same number of answers.
    """
    training = model.training
    model.eval()
    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]) + len(completion_ids[i]))
    scores, entropies = ([torch.empty(0)] * len(order) for _ in range(2))
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = pad_sequences([prompt_ids[i] for i in chunk], [completion_ids[i] for i in chunk], pad_token_id)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        logps, entropy, mask = (tensor.cpu() for tensor in completion_logps(model, batch))
        for row, i in enumerate(chunk):
            scores[i], entropies[i] = logps[row, mask[row]], entropy[row, mask[row]]
    model.train(training)
    return scores, entropies


def score(
    accelerator: Accelerator,
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    pad_token_id: int,
    batch_size: int,
) -> list[torch.Tensor]:
    """The log-probabilities of `score_with_entropies` alone."""
    return score_with_entropies(accelerator, model, prompt_ids, completion_ids, pad_token_id, batch_size)[0]
