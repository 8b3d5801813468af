"""What runs have logged, and how several runs are put together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..config import HACPOConfig
from ..trainer import RUN_STATE


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        folder: Its output directory, or one of its checkpoints.
        agents: The agents' names.
        args: Its settings.
        updates_per_step: U.
        log: The entries of its log, in their order; each has a `step`, in updates.
    """

    folder: Path
    agents: tuple[str, ...]
    args: HACPOConfig
    updates_per_step: int
    log: Sequence[Mapping[str, Any]]

    def series(self, key: str, missing: float | None = None) -> dict[int, float]:
        """One metric by update; the later entry counts where there are two.

        Args:
            key: The metric.
            missing: What it is in logs of training that have no entry for it; None leaves them out.
        """
        series = {} if missing is None else {int(e["step"]): missing for e in self.log if "loss" in e}
        return series | {int(entry["step"]): float(entry[key]) for entry in self.log if key in entry}


def read_run(folder: Path) -> Run:
    """Reads a run from its last checkpoint, or the checkpoint itself.

    Raises:
        ValueError: if there is no log, or nothing has been logged yet.
    """
    folder = Path(folder)
    checkpoint = folder
    if not (folder / TRAINER_STATE_NAME).is_file():
        last = get_last_checkpoint(folder) if folder.is_dir() else None
        if last is None:
            raise ValueError(
                f"{folder} is no run: it holds no checkpoint with a {TRAINER_STATE_NAME}. A run logs into its "
                "checkpoints; give its output_dir, after its first save_steps."
            )
        checkpoint = Path(last)
    log = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["log_history"]
    # Of an agent's metrics one that evaluations, named `eval_<agent>/...`, have not.
    named = (key.split("/")[0] for entry in log for key in entry if key.endswith("/grad_norm"))
    agents = tuple(sorted(set(named)))
    if not agents:
        raise ValueError(f"{checkpoint} has no log of any agent yet.")
    state = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
    # The trainer's own file, of a run of one's own: settings as Python objects.
    args = torch.load(checkpoint / TRAINING_ARGS_NAME, weights_only=False)
    return Run(folder, agents, args, state["updates_per_step"], log)


@dataclass(frozen=True)
class Group:
    """Runs that are drawn as one: seeds of the same settings.

    Attributes:
        label: What the group is called.
        runs: Its runs.
    """

    label: str
    runs: Sequence[Run]

    @property
    def agents(self) -> tuple[str, ...]:
        return self.runs[0].agents

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics that any of the runs has logged."""
        return {key for run in self.runs for entry in run.log for key in entry}

    def values(self, key: str, missing: float | None = None) -> dict[int, list[float]]:
        """One metric by update, a value for each run, at the updates that all runs have logged it at."""
        of_runs = [run.series(key, missing) for run in self.runs]
        common = sorted(set.intersection(*(set(series) for series in of_runs)))
        return {step: [series[step] for series in of_runs] for step in common}


def read_group(text: str) -> Group:
    """A group as the command line names it: `FOLDER`, or `LABEL=FOLDER,FOLDER,...`."""
    label, _, folders = text.rpartition("=")
    runs = [read_run(Path(folder)) for folder in folders.split(",")]
    group = Group(label or Path(folders).name, runs)
    for run in runs[1:]:
        if set(run.agents) != set(group.agents):
            raise ValueError(
                f"The runs of '{group.label}' have different agents: {runs[0].folder} has {list(runs[0].agents)}, "
                f"{run.folder} has {list(run.agents)}."
            )
    return group
