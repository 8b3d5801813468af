"""What the distributed tests run on every process: `accelerate launch tests/launched.py SCENARIO FOLDER`."""

import json
import os
import sys
from pathlib import Path

import tiny
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from hacpo_trl.miniature import conv_dataset


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
        if trainer.is_world_process_zero():
            names = [name for name, _ in trainer.agents[name].policy.named_parameters()]
            state[name] = torch.cat([gathered[name].flatten() for name in names])
    if trainer.is_world_process_zero():
        torch.save(state, path.with_suffix(".pt"))
        path.with_suffix(".json").write_text(json.dumps(trainer.state.log_history))


def models(folder: Path) -> dict[str, str]:
    """Policies that the test has put there: loaded by each backend in its own way."""
    return {name: str(folder / "policies" / name) for name in ("qwen", "llama")}


def updates(folder: Path):
    """Three updates in two orders, cut two ways; with settings that are an agent's own; with an adapter and
    reference policies."""
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


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp_on_cpus()
    {f.__name__: f for f in (updates, dropped, resume, resume_alone, evaluate, reward_model)}[sys.argv[1]](
        Path(sys.argv[2])
    )
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
