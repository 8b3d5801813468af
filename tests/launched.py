"""What the distributed tests run on every process: `accelerate launch tests/launched.py SCENARIO FOLDER`."""

import json
import os
import sys
from pathlib import Path

import tiny
import torch
from accelerate import PartialState

from hacpo_trl.miniature import conv_dataset


def save(trainer, path: Path):
    """The main process writes each agent's parameters and the training log; every process checks that it has the
    same."""
    state = {name: tiny.parameters(trainer, name) for name in trainer.agents}
    for name, vector in state.items():
        everywhere = trainer.accelerator.gather(vector[None])
        assert torch.equal(everywhere[0], everywhere[-1]), f"agent {name} differs between processes"
    if trainer.is_world_process_zero():
        torch.save(state, path.with_suffix(".pt"))
        path.with_suffix(".json").write_text(json.dumps(trainer.state.log_history))


def updates(folder: Path):
    """Three updates in two orders, cut two ways."""
    for order in ("mixed", "self_first"):
        for size, accumulation in ((4, 1), (2, 2)):
            name = f"{order}-{size}x{accumulation}"
            trainer = tiny.trainer(
                folder / name,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                minibatch_order=order,
                **tiny.PLAIN_SGD,
            )
            trainer.train()
            save(trainer, folder / name)


def dropped(folder: Path):
    """On the second process no answer of the peer can be learned from."""
    here = os.environ["RANK"] == "1"
    generation = tiny.ScriptedGeneration(["qwen", "llama"], cut=["llama"], where=lambda prompt: here)
    for order in ("mixed", "self_first"):
        settings = {"per_device_train_batch_size": 4, "minibatch_order": order}
        trainer = tiny.trainer(folder / order, generation=generation, **settings)
        trainer.train()
        save(trainer, folder / f"dropped-{order}")


def resume(folder: Path):
    """A run of 7 updates, and the same from its checkpoint 3, which lies within a step; sampled for real."""
    settings = {
        "generation": None,
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = tiny.trainer(folder / "whole", **settings)
    whole.train()
    save(whole, folder / "whole")
    resumed = tiny.trainer(folder / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    save(resumed, folder / "resumed")


def evaluate(folder: Path):
    """Five prompts on two processes: the sixth place is a stand-in that must not count."""
    trainer = tiny.trainer(
        folder / "evaluate",
        per_device_train_batch_size=4,
        eval_dataset=conv_dataset("test", 5),
        per_device_eval_batch_size=2,
    )
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        (folder / "evaluate.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    {f.__name__: f for f in (updates, dropped, resume, evaluate)}[sys.argv[1]](Path(sys.argv[2]))
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
