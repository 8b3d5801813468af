"""One transformers `Trainer`, N policies.

`trainer.model` is a plain container, `PolicyPool`, that is never wrapped for a backend. Each policy has an
`Accelerator`, a wrapped model, an optimizer and a scheduler of its own, so that clipping, schedules and states are an
agent's own. Of transformers' `Trainer` everything stays that does not care how many models there are: epochs,
accumulation, callbacks, logging, rotation of checkpoints, resuming.

A checkpoint holds a folder for each agent that loads with `from_pretrained`:

    checkpoint-40/
    ├── qwen/    config.json, model.safetensors, tokenizer files, hacpo_agent.json, README.md, optimizer.pt, ...
    ├── llama/   the same
    └── trainer_state.json, launch.json, rng_state.pth, training_args.bin
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from huggingface_hub import HfApi
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, get_scheduler
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.generic import strtobool
from trl.models.utils import prepare_deepspeed
from trl.trainer.utils import generate_model_card, get_config_model_id

from . import fsdp_plugins
from .agent import Agent
from .config import HACPOConfig
from .deepspeed_plugins import finalize_plugin, plugins_of


logger = logging.get_logger(__name__)

PAPER = {
    "title": "Heterogeneous Agent Collaborative Reinforcement Learning",
    "id": "2603.02604",
    "citation": (
        "@article{hacpo2026,\n"
        "    title        = {{Heterogeneous Agent Collaborative Reinforcement Learning}},\n"
        "    year         = 2026,\n"
        "    eprint       = {arXiv:2603.02604}\n"
        "}"
    ),
}
# Files that only a resumed run needs; they do not belong into a model repository.
RESUME_ONLY = [
    *(OPTIMIZER_NAME, SCHEDULER_NAME),
    *("global_step*", "latest", "zero_to_*.py", "*_states.pt"),
    *("optimizer_0*", "optimizer.bin", "pytorch_model_fsdp*"),
]

# In a checkpoint: how the run that saved it was launched.
LAUNCH_STATE = "launch.json"


class PolicyPool(nn.Module):
    """The policies of all agents, as the one model that `Trainer` knows.

    Attributes:
        policies: The models as they load and save.
        wrapped: The same models as they train (DDP and the like), once training has begun. A plain dict: the pool must
            not register their parameters a second time.
    """

    accepts_loss_kwargs = False

    def __init__(self, policies: Mapping[str, nn.Module]):
        super().__init__()
        self.policies = nn.ModuleDict(policies)
        self.wrapped: dict[str, nn.Module] = {}

    def forward(self, *args, **kwargs):
        raise RuntimeError("A PolicyPool has no forward pass: call one agent's policy.")

    def train(self, mode: bool = True):
        for model in self.wrapped.values():
            model.train(mode)
        return super().train(mode)

    @contextlib.contextmanager
    def no_sync(self):
        """Accelerate finds this under `Accelerator.no_sync`: no policy reduces gradients within an accumulation."""
        with contextlib.ExitStack() as stack:
            for model in self.wrapped.values():
                if hasattr(model, "no_sync"):
                    stack.enter_context(model.no_sync())
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool):
        """The same under FSDP2, which Accelerate addresses by this name."""
        for model in self.wrapped.values():
            model.set_requires_gradient_sync(requires_gradient_sync)

    def gradient_checkpointing_enable(self, **kwargs):
        for policy in self.policies.values():
            policy.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs):
        for policy in self.policies.values():
            policy.activation_checkpointing_enable(**kwargs)


class PolicyOptimizers:
    """What the training loop sees as its optimizer: all agents' optimizers, stepped together."""

    def __init__(self, optimizers: Mapping[str, Any]):
        self.optimizers = dict(optimizers)

    def step(self):
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(*args, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


class PolicySchedulers:
    """What the training loop sees as its learning-rate scheduler."""

    def __init__(self, schedulers: Mapping[str, Any]):
        self.schedulers = dict(schedulers)

    def step(self):
        for scheduler in self.schedulers.values():
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        return [scheduler.get_last_lr()[0] for scheduler in self.schedulers.values()]


class MultiPolicyTrainer(Trainer):
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
        self._check_launch()

    def _check_launch(self):
        """Refuses launches that would train something else than was asked for."""
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
        if self.args.n_gpu > 1:
            raise ValueError(
                "Several GPUs are visible to one process, which Trainer would serve by nn.DataParallel. Use "
                "`accelerate launch`, or make one GPU visible with CUDA_VISIBLE_DEVICES."
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

    # ---- saving and loading -----------------------------------------------------------------------------------------
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Saves every agent to `output_dir/<agent>/`, as `from_pretrained` reads it, with tokenizer and model card."""
        output_dir = Path(output_dir or self.args.output_dir)
        for name, agent in self.agents.items():
            accelerator, wrapped = self.engine(name)
            state_dict = accelerator.get_state_dict(wrapped)
            if self.args.should_save:
                folder = output_dir / name
                agent.policy.save_pretrained(folder, state_dict=state_dict)
                agent.save_tokenizer(folder)
                self._save_model_card(agent, folder)
        if self.args.should_save:
            torch.save(self.args, output_dir / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_model_card(self, agent: Agent, folder: Path):
        base = get_config_model_id(agent.policy.config)
        generate_model_card(
            base_model=base if base and not os.path.isdir(base) else None,
            model_name=self.repository(agent.name).split("/")[-1],
            hub_model_id=self.repository(agent.name),
            dataset_name=None,
            tags=["trl", "hacpo", *(["trackio"] if "trackio" in self.args.report_to else [])],
            wandb_url=None,
            trackio_url=None,
            trainer_name="HACPO",
            trainer_citation=PAPER["citation"],
            paper_title=PAPER["title"],
            paper_id=PAPER["id"],
        ).save(folder / "README.md")

    def _save_optimizer_and_scheduler(self, output_dir: str):
        if self.args.should_save:
            launch = {"backend": self.backend, "num_processes": self.accelerator.num_processes}
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            (Path(output_dir) / LAUNCH_STATE).write_text(json.dumps(launch))
        for name in self.agents:
            folder = Path(output_dir) / name
            accelerator, wrapped = self.engine(name)
            if self.is_deepspeed_enabled:
                wrapped.save_checkpoint(folder)
            elif self.is_fsdp_enabled:
                # Each process writes its shards; save_model writes the policy as one.
                plugin, optimizer = self._fsdp_plugin, self.optimizer.optimizers[name].optimizer
                save_fsdp_model(plugin, accelerator, wrapped, folder, adapter_only=self.agents[name].is_adapter)
                save_fsdp_optimizer(plugin, accelerator, optimizer, wrapped, folder)
            elif self.args.should_save:
                torch.save(self.optimizer.optimizers[name].state_dict(), folder / OPTIMIZER_NAME)
            if self.args.should_save:
                torch.save(self.lr_scheduler.schedulers[name].state_dict(), folder / SCHEDULER_NAME)

    def check_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        """Refuses a checkpoint that this launch cannot continue, before anything of it is loaded.

        Returns:
            `backend` and `num_processes` of the run that saved it.
        """
        for name in self.agents:
            if not os.path.isdir(os.path.join(checkpoint, name)):
                raise ValueError(
                    f"The checkpoint {checkpoint} has no agent '{name}'. It holds: "
                    f"{sorted(entry.name for entry in os.scandir(checkpoint) if entry.is_dir())}."
                )
        saved = json.loads((Path(checkpoint) / LAUNCH_STATE).read_text())
        processes = self.accelerator.num_processes
        # DeepSpeed cuts optimizer states for one number of processes. Torch's distributed checkpoint, of FSDP2, is cut
        # anew when it is read, and under DDP nothing is cut.
        recut = not self.is_deepspeed_enabled or saved["num_processes"] == processes
        if saved["backend"] != self.backend or not recut:
            raise ValueError(
                f"The checkpoint {checkpoint} was saved under {saved['backend']} (processes: "
                f"{saved['num_processes']}); this run is under {self.backend} (processes: {processes}), which cannot "
                "read the optimizer states. Resume as it was saved, or start a new run from the policies: each "
                "agent's folder in the checkpoint is a model_name_or_path."
            )
        return saved

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None):
        """Loads every agent's weights from its folder."""
        self.check_checkpoint(resume_from_checkpoint)
        self._weight_loads += 1
        for name, policy in self.model.policies.items():
            super()._load_from_checkpoint(os.path.join(resume_from_checkpoint, name), model=policy)

    def _issue_warnings_after_load(self, load_result):
        # Tied weights are saved once, so they are missing where they are tied to: no reason to warn.
        tied = {key for p in self.model.policies.values() for key in (getattr(p, "_tied_weights_keys", None) or ())}
        missing = [key for key in load_result.missing_keys if key not in tied]
        if missing or load_result.unexpected_keys:
            logger.warning(f"Loaded with missing keys {missing} and unexpected keys {load_result.unexpected_keys}.")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        if checkpoint is None:
            return
        self._weight_loads += 1
        for name in self.agents:
            folder, is_adapter = Path(checkpoint) / name, self.agents[name].is_adapter
            accelerator, wrapped = self.engine(name)
            if self.is_deepspeed_enabled:
                # Weights and optimizer together: each process reads its own shards.
                deepspeed_load_checkpoint(wrapped, str(folder), load_module_strict=not is_adapter)
            elif self.is_fsdp_enabled:
                plugin, optimizer = self._fsdp_plugin, self.optimizer.optimizers[name].optimizer
                load_fsdp_model(plugin, accelerator, wrapped, folder, adapter_only=is_adapter)
                load_fsdp_optimizer(plugin, accelerator, optimizer, wrapped, folder)
            else:
                # An optimizer moves what it loads to where its parameters are.
                optimizer_state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
                self.optimizer.optimizers[name].load_state_dict(optimizer_state)
            self.lr_scheduler.schedulers[name].load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self):
        logger.info(f"Loading the best checkpoint, {self.state.best_model_checkpoint} ({self.state.best_metric}).")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    # ---- the Hub ----------------------------------------------------------------------------------------------------
    def repository(self, name: str) -> str:
        """The Hub repository of one agent: its own `hub_model_id`, or the run's with the agent's name behind it."""
        run = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return self.agents[name].config.hub_model_id or f"{run}-{name}"

    def init_hf_repo(self, token: str | None = None, private: bool | None = None):
        if not self.is_world_process_zero():
            return
        api = HfApi(token=token or self.args.hub_token)
        private = self.args.hub_private_repo if private is None else private
        self.hub_model_ids = {
            name: api.create_repo(self.repository(name), private=private, exist_ok=True).repo_id
            for name in self.agents
        }
        self.hub_model_id = next(iter(self.hub_model_ids.values()))
        self._pushes = []

    def _upload(self, name: str, folder: Path, message: str, **kwargs):
        return HfApi(token=self.args.hub_token).upload_folder(
            repo_id=self.hub_model_ids[name], folder_path=folder, commit_message=message, **kwargs
        )

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token=None, revision=None, **kwargs
    ):
        """Pushes every agent to its own repository.

        Returns:
            The commit (or, with `blocking=False`, its future) of each agent by name; None on processes that do not
            push.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        revision = revision or self.args.hub_revision
        return {
            name: self._upload(
                name,
                Path(self.args.output_dir) / name,
                commit_message,
                run_as_future=not blocking,
                ignore_patterns=RESUME_ONLY,
                revision=revision,
            )
            for name in self.agents
        }

    def _push_from_checkpoint(self, checkpoint_folder: str):
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and any(not push.done() for push in self._pushes):
            return
        message = f"Training in progress, step {self.state.global_step}"
        for name in self.agents:
            folder = Path(checkpoint_folder) / name
            common = {"run_as_future": True, "revision": self.args.hub_revision}
            self._pushes.append(self._upload(name, folder, message, ignore_patterns=RESUME_ONLY, **common))
            if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                last = self.args.hub_strategy == HubStrategy.CHECKPOINT
                path = "last-checkpoint" if last else Path(checkpoint_folder).name
                self._pushes.append(self._upload(name, folder, f"{message}, checkpoint", path_in_repo=path, **common))

    def _finish_current_push(self):
        """Waits for uploads under way; one that failed says so."""
        pushes, self._pushes = getattr(self, "_pushes", []), []
        for push in pushes:
            push.result()
