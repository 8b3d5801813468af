"""What runs have logged, and how several runs are put together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..files import RUN_STATE, SETTINGS


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        folder: Its output directory, or one of its checkpoints.
        agents: The agents' names.
        args: Its settings.
        updates_per_step: U; None for a run without a checkpoint.
        log: The entries of its log, in their order; each has a `step`, in updates.
    """

    folder: Path
    agents: tuple[str, ...]
    args: SimpleNamespace
    updates_per_step: int | None
    log: Sequence[Mapping[str, Any]]

    def series(self, key: str, missing: float | None = None) -> dict[int, float]:
        """One metric by update; the later entry counts where there are two.

        Args:
            key: The metric.
            missing: What it is in logs of training that have no entry for it; None leaves them out.
        """
        series = {} if missing is None else {int(e["step"]): missing for e in self.log if "loss" in e}
        return series | {int(entry["step"]): float(entry[key]) for entry in self.log if key in entry}


def _step(folder: Path) -> int:
    """The update that a folder's log has come to; -1 if it has none."""
    path = folder / TRAINER_STATE_NAME
    return json.loads(path.read_text(encoding="utf-8"))["global_step"] if path.is_file() else -1


def read_run(folder: Path) -> Run:
    """Reads a run's latest log: that of its output directory (`Trainer.save_state`) or of its last checkpoint.

    Raises:
        ValueError: if there is no log, or nothing has been logged yet.
    """
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    folders = [folder, *([Path(last)] if last is not None else [])]
    newest = max(folders, key=_step)
    if _step(newest) < 0:
        raise ValueError(
            f"{folder} is no run: neither it nor a checkpoint in it has a {TRAINER_STATE_NAME}. Give the "
            "output_dir of a run, after its first save_steps."
        )
    log = json.loads((newest / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["log_history"]
    # Of an agent's metrics one that evaluations, named `eval_<agent>/...`, have not.
    named = (key.split("/")[0] for entry in log for key in entry if key.endswith("/grad_norm"))
    agents = tuple(sorted(set(named)))
    if not agents:
        raise ValueError(f"{newest} has no log of any agent yet.")
    states = [f / RUN_STATE for f in folders if (f / RUN_STATE).is_file()]
    updates = json.loads(states[0].read_text(encoding="utf-8"))["updates_per_step"] if states else None
    path = newest / SETTINGS
    if not path.is_file():
        raise ValueError(f"{newest} has no {SETTINGS}, in which the trainer writes a run's settings.")
    return Run(folder, agents, SimpleNamespace(**json.loads(path.read_text(encoding="utf-8"))), updates, log)


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
