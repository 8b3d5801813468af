"""One transformers `Trainer`, N policies.

`trainer.model` is a plain container, `PolicyPool`, that is never wrapped for a backend. Each policy has an
`Accelerator`, a wrapped model, an optimizer and a scheduler of its own, so that clipping, schedules and states are an
agent's own. Of transformers' `Trainer` everything stays that does not care how many models there are: epochs,
accumulation, callbacks, logging, rotation of checkpoints, resuming.

Four parts, each on top of the next: the policies at work (here), the folder that a run writes to (`run_folder.py`),
saving and loading (`checkpoints.py`), the Hub (`hub.py`).
"""

import math
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from transformers.utils.generic import strtobool
from trl.models.utils import prepare_deepspeed

from ..agent import Agent
from ..config import HACPOConfig
from . import fsdp_plugins
from .deepspeed_plugins import finalize_plugin, plugins_of
from .policies import PolicyOptimizers, PolicyPool, PolicySchedulers
from .run_folder import RunFolder
from .stopping import StopOnSignals, TrainingStopped


logger = logging.get_logger(__name__)

# How long a run that is told to stop waits for uploads under way.
SECONDS_TO_PUSH = 30.0


class ProcessHangsError(RuntimeError):
    """A process has waited for another one for longer than `ddp_timeout`."""

    # The others may have another error, or none.
    of_one_process = True


class MultiPolicyTrainer(RunFolder):
    """`transformers.Trainer` over N policies. A subclass says what one agent's loss is, in `training_step`.

    Args:
        agents: The agents, by name.
        args: The run's settings.
        initial_policies: For each agent that wants one, a frozen copy of its policy at the start; `references` holds
            it, ready for forward passes, once training has begun.
        kwargs: Further arguments of `Trainer`.
    """

    args: HACPOConfig

    def __init__(
        self, agents: Mapping[str, Agent], args: HACPOConfig, initial_policies: Mapping[str, nn.Module], **kwargs
    ):
        self.agents = dict(agents)
        self.initial_policies = dict(initial_policies)
        self.references: dict[str, nn.Module] = {}
        self._weight_loads = 0
        super().__init__(model=PolicyPool({n: a.policy for n, a in self.agents.items()}), args=args, **kwargs)
        self._stopping = StopOnSignals(self.accelerator)
        self.add_callback(self._stopping)
        self._check_launch()

    def _check_launch(self):
        """Refuses launches that would train something else than was asked for."""
        self.check_repositories()
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.accelerator.num_processes != world_size:
            raise RuntimeError(
                f"The launcher started {world_size} processes, but Accelerate sees {self.accelerator.num_processes}: "
                "each would train on its own. Without a GPU, use a config with distributed_type MULTI_GPU, such as "
                "configs/accelerate/cpu_2proc.yaml, or torchrun."
            )
        if strtobool(os.environ.get("ACCELERATE_USE_FSDP", "false")) and not self.is_fsdp_enabled:
            raise RuntimeError(
                "The launch asks for FSDP, which Accelerate offers on GPUs only: every process would hold whole "
                "policies. Use configs/accelerate/cpu_2proc.yaml or cpu.yaml."
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise NotImplementedError(
                "FSDP version 1 is not supported. Set fsdp_version: 2, as in configs/accelerate/fsdp2.yaml."
            )
        if self.args.load_best_model_at_end and self.args.save_only_model and self.backend != "DDP":
            raise ValueError(
                f"load_best_model_at_end needs the shards that a checkpoint has under {self.backend}, which "
                "save_only_model=True leaves out. Set one of them to False."
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                "Several GPUs are visible to one process, which Trainer would serve by nn.DataParallel. Use "
                "`accelerate launch`, or make one GPU visible with CUDA_VISIBLE_DEVICES."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """Trains all agents; `trainer.state.log_history` has what was measured.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the newest complete one in `output_dir`; what
                `args.resume_from_checkpoint` says if None.
            kwargs: Further arguments of `Trainer.train`.

        Raises:
            RunFolderError: `output_dir` cannot be written or belongs to a run that is under way, or the checkpoint is
                damaged.
            ValueError: There is nothing to train on, or the checkpoint is of another run.
            ProcessHangsError: A process has waited for another one for longer than `ddp_timeout`.
            TrainingStopped: The run was told to stop (Ctrl-C, SIGTERM, SIGUSR1), and is saved; it ends the program.
        """
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset; this trainer was made without one, to evaluate or save.")
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        try:
            with self._of_this_run():
                return super().train(resume_from_checkpoint=self._resolve(resume_from_checkpoint), **kwargs)
        except RuntimeError as error:
            if self.accelerator.num_processes == 1 or "timed out" not in str(error).lower():
                raise
            raise ProcessHangsError(
                f"Process {self.args.process_index} has waited for another one for longer than ddp_timeout="
                f"{self.args.ddp_timeout} s in update {self.state.global_step + 1}: it hangs, or is far behind. "
                f"({str(error).splitlines()[0]})"
            ) from error

    def predict(self, *args, **kwargs):
        raise NotImplementedError(
            "predict() has no meaning for several language models. evaluate() samples their answers and scores them; "
            "`hacpo evaluate` keeps every answer."
        )

    @property
    def backend(self) -> str:
        """How policies and optimizer states are dealt to processes. Under DDP, and on one process, each has all."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        return "FSDP2" if self.is_fsdp_enabled else "DDP"

    # ---- accelerators -----------------------------------------------------------------------------------------------
    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        accelerator_args = super()._build_accelerator_args(**kwargs)
        if self.args.ddp_find_unused_parameters is None:
            # Trainer searches for unused parameters in whatever is no PreTrainedModel, at a price; a policy has none.
            accelerator_args["kwargs_handlers"][0].find_unused_parameters = False
        if (plugin := accelerator_args.get("deepspeed_plugin")) is not None:
            accelerator_args["deepspeed_plugin"] = plugins_of(plugin, self.agents, self.args)
        self._accelerator_args = accelerator_args
        return accelerator_args

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        # A second prepare() on one Accelerator would keep the first model's engine for backward: one for each agent.
        first, *others = self.agents
        self.accelerators = {first: self.accelerator}
        # Of the launch. While a policy is wrapped, its agent's stands in its place.
        self._fsdp_plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        # DeepSpeed plugins are the first one's to hand over: all accelerators share one state.
        shared = {key: value for key, value in self._accelerator_args.items() if key != "deepspeed_plugin"}
        self.accelerators.update({name: Accelerator(**shared) for name in others})

    def engine(self, name: str) -> tuple[Accelerator, nn.Module]:
        """One agent's accelerator and its policy as it runs: wrapped once training has begun.

        To be called anew whenever an agent's turn comes: under DeepSpeed it also selects the agent's configuration.
        """
        if self.is_deepspeed_enabled:
            self.accelerator.state.select_deepspeed_plugin(name)
        if name not in self.model.wrapped and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise RuntimeError(
                f"Agent '{name}' is sharded when train() begins, and cannot run before. Set eval_on_start=True to "
                "evaluate the initial policies."
            )
        return self.accelerators[name], self.model.wrapped.get(name, self.model.policies[name])

    @property
    def weights_version(self) -> tuple[int, int]:
        """Changes whenever the policies' weights do: how often they were loaded, and the updates made."""
        return self._weight_loads, self.state.global_step

    def _inner_training_loop(self, *args, **kwargs):
        for accelerator in list(self.accelerators.values())[1:]:
            accelerator.free_memory()
        return super()._inner_training_loop(*args, **kwargs)

    def _finalize_training(self, trial, num_train_samples, start_time):
        if not self._stopping.number:
            return super()._finalize_training(trial, num_train_samples, start_time)
        # Not the end of the run: neither its summary nor its best policies.
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push(SECONDS_TO_PUSH)
        checkpoint = str(Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.accelerator.is_main_process:
            name, done = signal.Signals(self._stopping.number).name, self.state.global_step
            print(
                f"Stopped by {name} after update {done} of {self.state.max_steps}, saved in {checkpoint}. "
                "--resume, or train(resume_from_checkpoint=True), continues there.",
                file=sys.stderr,
            )
        raise TrainingStopped(self._stopping.number, checkpoint)

    def _warmup_steps(self, name: str, max_steps: int) -> int:
        own = self.agents[name].config.warmup_steps
        if own is None:
            return self.args.get_warmup_steps(max_steps)
        return int(own) if own >= 1 else math.ceil(max_steps * own)

    def _prepare_reference(self, name: str) -> nn.Module:
        initial, accelerator = self.initial_policies[name], self.accelerators[name]
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(initial, accelerator)
        if self.is_fsdp_enabled:
            return fsdp_plugins.prepare_reference(accelerator, initial)
        return accelerator.prepare_model(initial, evaluation_mode=True)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if resume_from_checkpoint is not None:
            self.check_checkpoint(resume_from_checkpoint)
        optimizers, schedulers = {}, {}
        for name, policy in self.model.policies.items():
            if self.is_deepspeed_enabled:
                self.accelerator.state.select_deepspeed_plugin(name)
                plugin = self.accelerator.state.deepspeed_plugin
                finalize_plugin(plugin, self.args, policy, max_steps, self.agents[name].setting("max_grad_norm"))
            if self.is_fsdp_enabled:
                self.accelerator.state.fsdp_plugin = fsdp_plugins.plugin_of(self._fsdp_plugin, name, policy)
                fsdp_plugins.reshard(policy)
            self.optimizer = None
            optimizer = self.create_optimizer(policy)
            for group in optimizer.param_groups:
                group["lr"] = self.agents[name].setting("learning_rate")
            # Trainer puts what decays (no biases, no norms) into the first group.
            optimizer.param_groups[0]["weight_decay"] = self.agents[name].setting("weight_decay")
            self.model.wrapped[name], optimizers[name] = self.accelerators[name].prepare(policy, optimizer)
            if self.is_fsdp_enabled:
                fsdp_plugins.make_generate_gather(self.model.wrapped[name])
            if name in self.initial_policies and name not in self.references:
                self.references[name] = self._prepare_reference(name)
            # Never prepared: Accelerate would step it once for every process.
            schedulers[name] = get_scheduler(
                self.agents[name].setting("lr_scheduler_type"),
                optimizer=optimizers[name],
                num_warmup_steps=self._warmup_steps(name, max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        self.optimizer, self.lr_scheduler = PolicyOptimizers(optimizers), PolicySchedulers(schedulers)
        self._created_lr_scheduler = True
        self.model_wrapped = self.model
        if self.is_deepspeed_enabled:
            # Trainer asks for it only to know that there is an engine.
            self.deepspeed = next(iter(self.model.wrapped.values()))
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for attribute in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, attribute, getattr(self, attribute))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    # ---- gradients --------------------------------------------------------------------------------------------------
    def _clip_grad_norm(self, model):
        # Trainer calls this only if args.max_grad_norm > 0, but an agent may clip where the run does not.
        return None

    def backward(self, name: str, loss: torch.Tensor):
        """The backward pass of one agent. Under DeepSpeed the last one of an update also clips and steps."""
        accelerator, _ = self.engine(name)
        # The loss is scaled for accumulation already.
        accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))

    def _get_grad_norm(self, model, grad_norm=None) -> float:
        """Clips every agent's gradient to its own norm; returns the largest norm before clipping."""
        self.grad_norms = {}
        for name, accelerator in self.accelerators.items():
            limit = self.agents[name].setting("max_grad_norm")
            norm = accelerator.clip_grad_norm_(
                self.model.wrapped[name].parameters(), limit if limit > 0 else torch.inf
            )
            self.grad_norms[name] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return max(self.grad_norms.values())

    def _get_learning_rate(self) -> float:
        return max(self.lr_scheduler.get_last_lr())
