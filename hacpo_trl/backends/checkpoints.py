"""Saving and loading: a folder for each agent that loads with `from_pretrained`, and what only resuming needs."""

import contextlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from safetensors import SafetensorError
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from ..files import INCOMPLETE, LAUNCH_STATE, SETTINGS
from ..options.secrets import settings_without_secrets
from .hub import HubUploads
from .manifest import move_files


logger = logging.get_logger(__name__)

# What torch.compile puts in front of the names of the module that it wraps.
COMPILED = "_orig_mod."


def refuse_keys(agent: str, missing: Sequence[str], unexpected: Sequence[str]):
    """Raises if a checkpoint's weights are not those of the agent that is to be continued."""
    if missing or unexpected:
        found = "; ".join(
            f"{what} {len(keys)} ({', '.join(list(keys)[:3])}{', ...' if len(keys) > 3 else ''})"
            for what, keys in (("lacks", missing), ("does not know", unexpected))
            if keys
        )
        raise ValueError(
            f"Agent '{agent}': the weights in the checkpoint are not its own. Of the policy's tensors the checkpoint "
            f"{found}. Resume with the model and the adapter settings that the run was begun with."
        )


def check_adapter(agent: str, policy: Any, folder: Path):
    """Raises if a saved adapter has other tensors than the one that is to be continued."""
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    if any(hasattr(parameter, "ds_id") for parameter in policy.parameters()):
        return
    own = get_peft_model_state_dict(policy, adapter_name=policy.active_adapter)
    saved = load_peft_weights(str(folder), device="cpu")
    refuse_keys(agent, sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys()))


class SaveError(RuntimeError):
    """Something cannot be written; the message says what and where."""


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Says what could not be written; libraries have errors of their own each for a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise SaveError(f"{what} cannot be written to {folder}: {error}") from error


class Checkpoints(HubUploads):
    """The part of `MultiPolicyTrainer` that writes and reads checkpoints; see `hacpo_trl.files` for what is in one."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Saves every agent to `output_dir/<agent>/`, as `from_pretrained` reads it, with tokenizer and model card."""
        root = Path(output_dir or self.args.output_dir)
        for name, agent in self.agents.items():
            accelerator, wrapped = self.engine(name)
            # Under ZeRO-3 only the main process gets it.
            gathered = accelerator.get_state_dict(wrapped) or {}
            # torch.compile's wrapper is no part of the policy: with its prefix, no key would be found again.
            state_dict = {key.replace(COMPILED, ""): value for key, value in gathered.items()}
            if self.args.should_save:
                # Beside its place, file by file moved there: a kill leaves no half of a file.
                folder, written = root / name, root / INCOMPLETE / name
                # Of an adapter's model the adapter that is trained, not the copy that the KL term measures by.
                only = {"selected_adapters": [agent.policy.active_adapter]} if agent.is_adapter else {}
                with writing(f"Agent '{name}'", folder):
                    agent.policy.save_pretrained(written, state_dict=state_dict, **only)
                    agent.save_tokenizer(written)
                    self.save_model_card(agent, written)
                    move_files(written, folder)
        if self.args.should_save:
            settings = json.dumps(settings_without_secrets(self.args), indent=2, ensure_ascii=False)
            with writing("The run's settings", root):
                shutil.rmtree(root / INCOMPLETE, ignore_errors=True)
                (root / SETTINGS).write_text(settings, encoding="utf-8")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        if self.args.should_save:
            launch = {"backend": self.backend, "num_processes": self.accelerator.num_processes}
            with writing("The run's state", Path(output_dir)):
                Path(output_dir).mkdir(parents=True, exist_ok=True)
                (Path(output_dir) / LAUNCH_STATE).write_text(json.dumps(launch))
        for name in self.agents:
            with writing(f"Agent '{name}': its optimizer and schedule", Path(output_dir) / name):
                self._save_optimizer_of(name, Path(output_dir) / name)

    def _save_optimizer_of(self, name: str, folder: Path):
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

    def _save_rng_state(self, output_dir: str):
        with writing("The state of the random numbers", Path(output_dir)):
            super()._save_rng_state(output_dir)

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
        launch = Path(checkpoint) / LAUNCH_STATE
        if not launch.is_file():
            raise ValueError(
                f"The checkpoint {checkpoint} was saved with save_only_model=True: the optimizers, schedules and the "
                "state of the run are missing, so it cannot be continued. Start a new run from the policies: each "
                "agent's folder in the checkpoint is a model_name_or_path."
            )
        saved = json.loads(launch.read_text())
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
        """Loads every agent's weights, to continue the run."""
        self.check_checkpoint(resume_from_checkpoint)
        self._load_policies(resume_from_checkpoint)

    def _load_policies(self, checkpoint: str):
        self._weight_loads += 1
        for name, policy in self.model.policies.items():
            folder = Path(checkpoint) / name
            if self.agents[name].is_adapter:
                check_adapter(name, policy, folder)
            self._loading = name
            super()._load_from_checkpoint(str(folder), model=policy)

    def _issue_warnings_after_load(self, load_result):
        # Tied weights are saved once, so they are missing under their other names.
        names_of: dict[int, set[str]] = defaultdict(set)
        for name, tensor in self.model.policies[self._loading].state_dict(keep_vars=True).items():
            names_of[id(tensor)].add(name)
        missing = set(load_result.missing_keys)
        missing -= {name for names in names_of.values() if names - missing for name in names}
        refuse_keys(self._loading, sorted(missing), load_result.unexpected_keys)

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
        best = self._resolve(self.state.best_model_checkpoint)
        logger.info(f"Loading the best checkpoint, {best} ({self.state.best_metric}).")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            # Sharded weights are read from the shards that resuming needs, which save_only_model does not write.
            self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)
        else:
            self._load_policies(self.state.best_model_checkpoint)
