"""No update is made of numbers that are none: the run ends before, and says where they came from."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from ..files import NON_FINITE
from ..rollouts.rows import LearnerRow
from .step_checkpoints import StepCheckpoints


class NonFiniteError(RuntimeError):
    """An agent's loss or gradient is not finite. The message names it, the update, and where its rows are.

    Attributes:
        agents: The agents' names.
        update: The update that was not made, counted from 1.
    """

    # Each process has rows of its own, and a loss may be faulty on one alone.
    of_one_process = True

    def __init__(self, message: str, agents: Sequence[str], update: int):
        super().__init__(message)
        self.agents, self.update = tuple(agents), update


class FiniteUpdates(StepCheckpoints):
    """The part of `HACPOTrainer` that ends a run before a faulty update.

    Under DeepSpeed, which clips and steps in one, the update has been made by then, but only in memory: nothing is
    saved after it.
    """

    def __init__(self, *args, **kwargs):
        # Of the update under way: each agent's rows and losses on this process.
        self._at_work: dict[str, list[tuple[Sequence[LearnerRow], torch.Tensor]]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def watched_backward(self, name: str, loss: torch.Tensor, rows: Sequence[LearnerRow]):
        """The backward pass of an agent's micro-batch, whose rows are kept until its gradient is known."""
        self._at_work[name].append((rows, loss.detach()))
        self.backward(name, loss)

    def _get_grad_norm(self, model, grad_norm=None) -> float:
        norm = super()._get_grad_norm(model, grad_norm)
        faulty = {
            name: f"norm of the gradient {self.grad_norms[name]}, loss {float(sum(loss for _, loss in at_work))}"
            for name, at_work in self._at_work.items()
            if not math.isfinite(self.grad_norms[name]) or not all(loss.isfinite() for _, loss in at_work)
        }
        if faulty:
            update = self.state.global_step + 1
            paths = [self._dump(name, update) for name in faulty]
            saved = "it is not saved" if self.is_deepspeed_enabled else "it was not made"
            raise NonFiniteError(
                f"Update {update} has no finite gradient, so {saved}. "
                + "; ".join(f"Agent '{name}': {numbers}" for name, numbers in faulty.items())
                + f". Its rows: {', '.join(map(str, paths))}. The last checkpoint is good; a lower learning_rate or "
                "max_grad_norm, weights in float32, or rewards of a smaller scale may help.",
                list(faulty),
                update,
            )
        self._at_work.clear()
        return norm

    def _dump(self, name: str, update: int) -> Path:
        """Writes an agent's rows of the update on this process, as JSON lines."""
        folder = Path(self.args.output_dir) / NON_FINITE
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"update-{update}-{name}-process-{self.accelerator.process_index}.jsonl"
        decode = self.agents[name].tokenizer.decode
        with path.open("w", encoding="utf-8") as file:
            for rows, loss in self._at_work[name]:
                for row in rows:
                    numbers = {
                        key: value if math.isfinite(value := float(getattr(row, key))) else str(value)
                        for key in ("reward", "advantage", "weight", "old_logprob_sum", "old_num_tokens")
                    }
                    told = {
                        "source": row.source,
                        "prompt": decode(row.prompt_ids),
                        "completion": decode(row.completion_ids),
                        "completion_ids": row.completion_ids,
                        "in_loss": row.in_loss,
                        **numbers,
                        "micro_batch_loss": str(float(loss)),
                    }
                    file.write(json.dumps(told, ensure_ascii=False) + "\n")
        return path
