"""What the distributed tests run on every process: `accelerate launch tests/launched.py SCENARIO,... FOLDER`."""

import json
import os
import signal
import sys
from pathlib import Path

import tiny
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.distributed import DistributedBackend

from hacpo_trl import HACPOTrainer
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.generation.vllm_servers import weights


def allow_fsdp_on_cpus():
    """Accelerate looks for FSDP's settings on GPUs only, though torch shards on CPUs as well."""
    initialize = AcceleratorState.__init__

    def initialize_like_gpus(self, *args, **kwargs):
        if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        initialize(self, *args, **kwargs)

    AcceleratorState.__init__ = initialize_like_gpus


def save(trainer, path: Path):
    """Writes each agent's parameters, gathered from wherever they are, and the training log."""
    state = {}
    for name in trainer.agents:
        accelerator, wrapped = trainer.engine(name)
        gathered = accelerator.get_state_dict(wrapped)
        if trainer.is_fsdp_enabled:
            assert all(isinstance(p, DTensor) for p in wrapped.parameters()), f"agent {name} is not sharded"
        elif not trainer.is_deepspeed_enabled:
            # Every process has all parameters: the same ones.
            everywhere = accelerator.gather(tiny.parameters(trainer, name)[None])
            assert torch.equal(everywhere[0], everywhere[-1]), f"agent {name} differs between processes"
        # What a vLLM server would be sent: gathered in buckets, by all processes.
        buckets = weights.weight_buckets(accelerator, trainer.agents[name].policy, torch.float32)
        sent = {key: tensor.clone() for bucket in buckets for key, tensor in bucket}
        if trainer.is_world_process_zero():
            names = [name for name, _ in trainer.agents[name].policy.named_parameters()]
            assert list(sent) == names and all(torch.equal(sent[key], gathered[key]) for key in names), name
            state[name] = torch.cat([gathered[name].flatten() for name in names])
    if trainer.is_world_process_zero():
        torch.save(state, path.with_suffix(".pt"))
        path.with_suffix(".json").write_text(json.dumps(trainer.state.log_history))


def models(folder: Path) -> dict[str, str]:
    """Policies that the test has put there: loaded by each backend in its own way."""
    return {name: str(folder / "policies" / name) for name in ("qwen", "llama")}


def updates(folder: Path):
    """Three updates in two orders, cut two ways; with settings that are an agent's own; with a baseline
    fitted on the step; with an adapter and reference policies."""
    for order in ("mixed", "self_first"):
        for size, accumulation in ((4, 1), (2, 2)):
            name = f"{order}-{size}x{accumulation}"
            trainer = tiny.trainer(
                folder / name,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                minibatch_order=order,
                models=models(folder),
                **tiny.PLAIN_SGD,
            )
            trainer.train()
            save(trainer, folder / name)

    settings = {**tiny.PLAIN_SGD, "models": models(folder), "per_device_train_batch_size": 4}
    own = tiny.trainer(folder / "own", **{**settings, **tiny.OWN_SETTINGS})
    own.train()
    save(own, folder / "own")

    shrinkage = tiny.trainer(
        folder / "shrinkage", advantage_baseline="shrinkage", reward_funcs=tiny.uneven_reward, **settings
    )
    shrinkage.train()
    save(shrinkage, folder / "shrinkage")

    adapter = tiny.trainer(folder / "adapter", **settings, **tiny.adapter(), beta=0.5)
    adapter.train()
    save(adapter, folder / "adapter")
    if not adapter.is_deepspeed_enabled:
        adapter.train()
        save(adapter, folder / "trained-again")


def dropped(folder: Path):
    """On the second process no answer of the peer can be learned from."""
    here = os.environ["RANK"] == "1"
    generation = tiny.ScriptedGeneration(["qwen", "llama"], cut=["llama"], where=lambda prompt: here)
    for order in ("mixed", "self_first"):
        settings = {"models": models(folder), "per_device_train_batch_size": 4, "minibatch_order": order}
        trainer = tiny.trainer(folder / order, generation=generation, **settings)
        trainer.train()
        save(trainer, folder / f"dropped-{order}")


def resume(folder: Path):
    """A run of 7 updates, and the same from its checkpoint 3, which lies within a step; sampled for real."""
    settings = {
        "models": models(folder),
        "generation": None,
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 3,
        "beta": 0.05,
    }
    whole = tiny.trainer(folder / "whole", **settings)
    whole.train()
    save(whole, folder / "whole")
    resumed = tiny.trainer(folder / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    save(resumed, folder / "resumed")
    resumed.save_model(str(folder / "saved"))

    # For the resumption by another number of processes.
    scripted = elsewhere(folder, "scripted", per_device_train_batch_size=4)
    scripted.train()
    save(scripted, folder / "scripted")


def elsewhere(folder: Path, run: str, **kwargs):
    """A run of 4 updates whose answers are scripted, so the same on any number of processes, with a checkpoint each.

    One agent trains an adapter. The optimizer has a state that tells, but does not blow rounding errors up.
    """
    settings = {"optim": "adamw_torch", "adam_epsilon": 0.1, "learning_rate": 0.1, "save_strategy": "steps"}
    settings |= {"max_steps": 4, "save_steps": 1, **tiny.adapter(), **kwargs}
    return tiny.trainer(folder / run, models=models(folder), **settings)


def resume_alone(folder: Path):
    """The run of two processes is continued by one: from between two steps, and from within one."""
    for checkpoint in ("checkpoint-2", "checkpoint-1"):
        trainer = elsewhere(folder, "alone")
        try:
            trainer.train(resume_from_checkpoint=str(folder / "scripted" / checkpoint))
        except ValueError as error:
            (folder / f"alone-{checkpoint}.txt").write_text(str(error))
        else:
            save(trainer, folder / f"alone-{checkpoint}")


def evaluate(folder: Path):
    """Five prompts on two processes: the sixth place is a stand-in that must not count."""
    trainer = tiny.trainer(
        folder / "evaluate",
        models=models(folder),
        per_device_train_batch_size=4,
        eval_dataset=conv_dataset("test", 5),
        per_device_eval_batch_size=2,
    )
    if trainer.is_deepspeed_enabled:
        trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        (folder / "evaluate.json").write_text(json.dumps(metrics))


def reward_model(folder: Path):
    """Two updates with a reward model beside a function."""
    trainer = tiny.trainer(
        folder / "reward_model",
        models=models(folder),
        reward_funcs=[str(folder / "judge"), tiny.partial_reward],
        per_device_train_batch_size=4,
        max_steps=2,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "reward_model.json").write_text(json.dumps(trainer.state.log_history))


def vllm_trainer(output_dir: Path, folder: Path, **settings):
    """A trainer whose agents have the servers that the test has started."""
    agents = json.loads((folder / "agents.json").read_text())
    return HACPOTrainer(
        None,
        tiny.partial_reward,
        tiny.config(
            output_dir,
            agents=agents,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_timeout=10,
            vllm_sync_timeout=60,
            max_completion_length=12,
            temperature=0.7,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            **{"per_device_train_batch_size": 4, **settings},
        ),
        conv_dataset("train", 16),
    )


def vllm(folder: Path):
    """Three steps of one update, sampled by servers; with log-probabilities of the trainer and of the servers."""
    moved = {}
    for mode in ("recompute", "sampler"):
        # One update a step holds all rollouts, so that both modes see every step's own ones before any update.
        trainer = vllm_trainer(folder / mode, folder, old_logprobs=mode, gradient_accumulation_steps=3)
        before = {name: whole(trainer, name) for name in trainer.agents}
        trainer.train()
        for name in trainer.agents:
            moved[f"{mode}/{name}"] = float((whole(trainer, name) - before[name]).abs().max())
        if trainer.is_world_process_zero():
            (folder / f"{mode}.json").write_text(json.dumps(trainer.state.log_history))
    if PartialState().is_main_process:
        (folder / "moved.json").write_text(json.dumps(moved))


def whole(trainer, name: str) -> torch.Tensor:
    """What one agent trains, gathered."""
    accelerator, _ = trainer.engine(name) if trainer.model.wrapped else (trainer.accelerators[name], None)
    parameters = [p for p in trainer.agents[name].policy.parameters() if p.requires_grad]
    with DistributedBackend(accelerator).gather_params(parameters):
        return torch.cat([parameter.detach().flatten().float().clone() for parameter in parameters])


class KillServer(TrainerCallback):
    """Kills a server after some update, from the main process."""

    def __init__(self, process_group: int, after: int):
        self.process_group, self.after = process_group, after

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after and state.is_world_process_zero:
            os.killpg(self.process_group, signal.SIGKILL)


def vllm_resume(folder: Path):
    """Four updates with a checkpoint after the second; the server is killed after the third if the test says so."""
    trainer = vllm_trainer(
        folder / "run", folder, gradient_accumulation_steps=2, max_steps=4, save_strategy="steps", save_steps=2
    )
    kill = folder / "kill.json"
    if kill.exists():
        trainer.add_callback(KillServer(**json.loads(kill.read_text())))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder / "run") if (folder / "run").exists() else None)
    if trainer.is_world_process_zero():
        (folder / "done.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    # Several buckets even for tiny policies.
    weights.BUCKET_BYTES = 50_000
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp_on_cpus()
    scenarios = (updates, dropped, resume, resume_alone, evaluate, reward_model, vllm, vllm_resume)
    by_name = {f.__name__: f for f in scenarios}
    for name in sys.argv[1].split(","):
        print("scenario:", name, flush=True)
        by_name[name](Path(sys.argv[2]))
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
