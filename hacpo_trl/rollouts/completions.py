"""The log of completions (`log_completions`): a sample on the terminal, all of them as parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from trl.trainer.utils import print_prompt_completions_sample

from ..config import HACPOConfig
from ..files import COMPLETIONS
from ..rewards.verification import Verdicts
from .rollout import Rollout


class CompletionLog:
    """Keeps the last step's rollouts until they are logged.

    Every log writes `output_dir/completions/completions_<step>.parquet`, a row for each rollout: step, agent, prompt,
    completion, finish reason, tokens, the reward of each function, the advantage in its own agent's eyes, and what
    reward functions added by `log_extra`.

    Args:
        args: The run's settings; nothing is kept unless `log_completions` is on.
    """

    def __init__(self, args: HACPOConfig):
        self.args = args
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def add(
        self,
        agent: str,
        rollouts: Sequence[Rollout],
        verdicts: Verdicts,
        functions: Sequence[str],
        advantages: torch.Tensor,
    ) -> None:
        """Replaces an agent's rollouts by those of a new step. `advantages`: `(N,)`."""
        if not self.args.log_completions:
            return
        for column, values in verdicts.extra.items():
            if len(values) != len(rollouts):
                raise ValueError(
                    f"log_extra('{column}') got {len(values)} values for {len(rollouts)} completions of "
                    f"agent '{agent}'."
                )
        self._rows[agent] = [
            {
                "agent": agent,
                "prompt": rollout.prompt,
                "completion": rollout.text,
                "finish_reason": rollout.finish_reason,
                "tokens": rollout.num_tokens,
                "rewards": dict(zip(functions, verdicts.per_function[i].tolist(), strict=True)),
                "advantage": float(advantages[i]),
                "extra": {column: values[i] for column, values in verdicts.extra.items()},
            }
            for i, rollout in enumerate(rollouts)
        ]

    def flush(self, step: int) -> None:
        """Writes and prints. Every process must call it."""
        if not self.args.log_completions:
            return
        rows = gather_object([row for of_agent in self._rows.values() for row in of_agent])
        self._rows.clear()
        if not PartialState().is_main_process or not rows:
            return
        table = [
            {
                "step": step,
                **{k: v for k, v in row.items() if k not in ("rewards", "extra")},
                **row["rewards"],
                **row["extra"],
            }
            for row in rows
        ]
        folder = Path(self.args.output_dir) / COMPLETIONS
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")
        for agent in dict.fromkeys(row["agent"] for row in rows):
            of_agent = [row for row in rows if row["agent"] == agent]
            functions, columns = of_agent[0]["rewards"], of_agent[0]["extra"]
            print_prompt_completions_sample(
                [row["prompt"] for row in of_agent],
                [row["completion"] for row in of_agent],
                {function: [row["rewards"][function] for row in of_agent] for function in functions},
                [row["advantage"] for row in of_agent],
                step,
                self.args.num_completions_to_print,
                extra={
                    "agent": [agent] * len(of_agent),
                    **{column: [row["extra"].get(column) for row in of_agent] for column in columns},
                },
            )
