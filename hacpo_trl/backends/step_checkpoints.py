"""Checkpoints that may lie within a step: they hold the rest of the step's rows, and what the run has measured."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..algorithm.alignment import Alignment
from ..algorithm.capability import CapabilityWindow
from ..files import PROCESS_STATE, RUN_STATE
from ..options.secrets import settings_without_secrets
from ..options.step import StepPlan
from ..reporting.metrics import Metrics
from ..rollouts.rows import LearnerRow
from .checkpoints import writing
from .multi_policy import MultiPolicyTrainer


logger = logging.get_logger(__name__)

# Settings that torch's optimizers and schedules save and load with their states: new values take no effect.
IN_THE_OPTIMIZER = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}
# Settings that a continued run has of its own: where it writes, how it shows itself, and what depends on the launch.
MAY_DIFFER = {
    *("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("local_rank", "deepspeed", "fsdp", "ddp_backend", "use_cpu", "resume_from_checkpoint", "push_to_hub"),
    # Their product with the number of processes is compared: rollouts of an update.
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
}


class _GoesOn(TrainerCallback):
    """Calls when a run has begun, after Trainer has set its running sums to 0 and before anything is added to them."""

    def __init__(self, begin: Callable[[], None]):
        self.begin = begin

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin()


class StepCheckpoints(MultiPolicyTrainer):
    """The part of `HACPOTrainer` that a resumed run needs to continue where it was, between any two updates.

    Attributes:
        plan: How a step is cut into updates.
        capability: The agents' windows.
        metrics: What was measured since the last log.
        alignment: The same, of this step.
        token_totals: Tokens since the beginning of the run.
    """

    plan: StepPlan
    capability: CapabilityWindow
    metrics: Metrics
    alignment: Alignment
    token_totals: dict[str, float]
    # The step's rows of each learner, in the order of its updates; None between steps.
    _rows: dict[str, list[LearnerRow]] | None = None
    # For each learner and update the rows that the mean of its loss runs over; None where they are to be counted.
    _rows_in_loss: dict[str, list[float]] | None = None
    _micro_step: int = 0
    # Trainer's sums of losses, and the seconds trained, of the parts of the run before this one.
    _losses_before: dict[str, Any] | None = None
    _seconds_before: float = 0.0
    _began: float = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(_GoesOn(self._go_on))

    def _go_on(self):
        self._began = time.monotonic()
        if self._losses_before is not None:
            self._tr_loss = self._losses_before["since_log"].to(self._tr_loss.device)
            self._total_loss_scalar = self._losses_before["logged"]
            self._globalstep_last_logged = self._losses_before["last_log"]
            # The mean loss and the speed that are logged at the end are those of the whole run.
            self._initial_global_step = 0

    def _run_epoch(self, **kwargs):
        # Trainer asks only after an update whether it was the last one.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler: bool = False):
        # With skip_scheduler it is the evaluation before training, which a run that is continued has had.
        if skip_scheduler and any(key.startswith("eval_") for log in self.state.log_history for key in log):
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _finalize_training(self, trial, num_train_samples, start_time):
        before = 0.0 if self._losses_before is None else self._seconds_before
        return super()._finalize_training(trial, num_train_samples, start_time - before)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        super()._save_optimizer_and_scheduler(output_dir)
        with writing("The state of the step", Path(output_dir)):
            self._save_step(Path(output_dir))

    def _save_step(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            state = {
                "capability_window": self.capability.state_dict(),
                "token_totals": self.token_totals,
                "updates_per_step": self.plan.updates,
                "updates_into_step": self.state.global_step % self.plan.updates,
                "shape_of_step": self._shape_of_step(),
                "settings": settings_without_secrets(self.args),
                "seconds": self._seconds_before + time.monotonic() - self._began,
            }
            (folder / RUN_STATE).write_text(json.dumps(state, indent=2))
        rows = None if self._rows is None else {name: [asdict(r) for r in rows] for name, rows in self._rows.items()}
        losses = {
            "since_log": self._tr_loss.detach().cpu(),
            "logged": self._total_loss_scalar,
            "last_log": self._globalstep_last_logged,
        }
        state = {
            "rows": rows,
            "metrics": self.metrics.state(),
            "alignment": self.alignment.state(),
            "losses": losses,
        }
        torch.save(state, folder / PROCESS_STATE.format(self.accelerator.process_index))

    def _shape_of_step(self) -> dict[str, Any]:
        """What the rows of a step that is under way were made and cut by."""
        args, plan = self.args, self.plan
        return {
            "prompts_per_step": plan.prompts,
            "num_generations": args.num_generations,
            "rollouts_per_update": plan.rows_per_update,
            "algorithm": args.algorithm,
            "minibatch_order": args.minibatch_order,
            "ratio_normalization": args.ratio_normalization,
            "agents": sorted(self.agents),
        }

    def _say_what_changed(self, before: Mapping[str, Any]):
        """Warns of settings that are others than in the run that is continued, and of those that take no effect."""
        now = settings_without_secrets(self.args)
        changed = {
            key: (before[key], now[key])
            for key in before
            if key in now and key not in MAY_DIFFER and before[key] != now[key]
        }
        if not changed:
            return
        listed = ", ".join(f"{key} {was!r} -> {is_now!r}" for key, (was, is_now) in sorted(changed.items()))
        idle = sorted(changed.keys() & IN_THE_OPTIMIZER)
        logger.warning(
            f"The run is continued with other settings: {listed}."
            + (f" Without effect: {', '.join(idle)}, which are in the optimizers' saved states." if idle else "")
        )

    def check_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        saved = super().check_checkpoint(checkpoint)
        step = json.loads((Path(checkpoint) / RUN_STATE).read_text())
        processes = self.accelerator.num_processes
        shape = self._shape_of_step()
        changed = {key: (value, shape[key]) for key, value in step["shape_of_step"].items() if value != shape[key]}
        if step["updates_into_step"] and changed:
            listed = ", ".join(f"{key} {was} there, {now} here" for key, (was, now) in changed.items())
            raise ValueError(
                f"The checkpoint {checkpoint} lies {step['updates_into_step']} updates into a step of "
                f"{step['updates_per_step']}, whose rows are in it; this run would cut them otherwise: {listed}. "
                "Resume with the settings of that run, or from a checkpoint between steps."
            )
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
        self._rows = self._rows_in_loss = self._losses_before = None
        self._seconds_before = 0.0
        if checkpoint is None:
            return
        state = json.loads((Path(checkpoint) / RUN_STATE).read_text())
        self.capability.load_state_dict(state["capability_window"])
        self.token_totals.update(state["token_totals"])
        self._seconds_before = state["seconds"]
        self._say_what_changed(state["settings"])
        if self.check_checkpoint(checkpoint)["num_processes"] != self.accelerator.num_processes:
            # Between steps: no rows are left to train on, and what was measured since the last log is gone.
            return
        path = Path(checkpoint) / PROCESS_STATE.format(self.accelerator.process_index)
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.metrics.load_state(state["metrics"])
        self.alignment.load_state(state["alignment"])
        self._losses_before = state["losses"]
        if state["rows"] is not None:
            self._rows = {name: [LearnerRow(**row) for row in rows] for name, rows in state["rows"].items()}
