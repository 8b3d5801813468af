"""A run of `hacpo train` in one process, or in each of those that a launcher has started."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.trainer_utils import get_last_checkpoint

from ..backends.finite import NonFiniteError
from ..backends.multi_policy import ProcessHangsError
from ..backends.run_folder import NoCheckpointError, RunFolderError
from ..config import HACPOConfig
from ..embedded import EMBEDDED, policy_paths
from ..generation.vllm_servers.client import VLLMServerError
from ..trainer import HACPOTrainer
from .errors import one_line, user_errors
from .recipes import FIRST_COPY
from .tasks import load_task
from .train_options import ScriptArguments


# What an evaluation logs, by the metric's name.
Evaluation = dict[str, float]

NEXT_STEPS = f"""
That was the embedded example. For models of your own, copy a recipe and put them in:
  hacpo recipes                                    # what there is, and what it needs
  hacpo recipes {FIRST_COPY} > my.yaml
  hacpo train --config my.yaml                     # on several GPUs with --accelerate_config zero3 --serve"""


def main_console(training_args: HACPOConfig) -> Console:
    """Where the main process says what happens, with warnings and without the bars of every file that is read."""
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)
    return Console(quiet=training_args.process_index > 0)


def with_embedded_policies(training_args: HACPOConfig, console: Console) -> HACPOConfig:
    """Makes the policies that agents name as `embedded:...` and puts their paths in place."""
    paths = [agent.model_name_or_path or "" for agent in training_args.agent_configs]
    if not any(path.startswith(EMBEDDED) for path in paths):
        return training_args
    # They are no faster on more threads, and far slower where other programs want the cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    names = [path.removeprefix(EMBEDDED) for path in paths if path.startswith(EMBEDDED)]
    with training_args.main_process_first(desc="making embedded policies"):
        made = iter(policy_paths(names, training_args.seed, progress=console.print))
    agents = [
        replace(agent, model_name_or_path=next(made)) if path.startswith(EMBEDDED) else agent
        for agent, path in zip(training_args.agent_configs, paths, strict=True)
    ]
    return replace(training_args, agents=agents)


def make_trainer(script_args: ScriptArguments, training_args: HACPOConfig, console: Console) -> HACPOTrainer:
    """Puts together everything that the arguments name."""
    if script_args.resume and training_args.resume_from_checkpoint is not None:
        raise ValueError("resume and resume_from_checkpoint say the same in two ways. Leave one of them out.")
    training_args = with_embedded_policies(training_args, console)
    train_dataset, eval_dataset, reward_funcs = load_task(script_args, training_args)
    if eval_dataset is not None:
        training_args.eval_on_start = True
    return HACPOTrainer(
        reward_funcs=reward_funcs, args=training_args, train_dataset=train_dataset, eval_dataset=eval_dataset
    )


def train(trainer: HACPOTrainer, resume: bool = False) -> tuple[Evaluation, Evaluation] | None:
    """Trains and saves; returns the evaluations before and after, None without held-out prompts.

    Args:
        trainer: What trains.
        resume: Whether to continue from the last checkpoint, if there is one.
    """
    args = trainer.args
    # What ends a run and is no mistake of the program.
    with one_line(RunFolderError, NonFiniteError, ProcessHangsError, VLLMServerError):
        try:
            trainer.train(resume_from_checkpoint=True if resume else None)
        except NoCheckpointError:
            if not resume:
                raise
            trainer.train()
    evaluations = None
    if trainer.eval_dataset is not None:
        after = trainer.evaluate()
        # A run that is continued may have begun without held-out prompts.
        evaluations = next(log for log in trainer.state.log_history if "eval_reward" in log), after
    if args.push_to_hub:
        trainer.push_to_hub()
    else:
        trainer.save_model()
    trainer.save_state()
    return evaluations


def print_summary(console: Console, trainer: HACPOTrainer, evaluations: tuple[Evaluation, Evaluation] | None):
    """Held-out accuracy before and after, tokens, and where the agents are."""
    args = trainer.args
    table = Table(title=f"{args.algorithm.upper()} after {trainer.state.global_step} updates of each agent")
    table.add_column("agent")
    for column in (*(("before", "after", "gain") if evaluations else ()), "tokens generated"):
        table.add_column(column, justify="right")
    for name in trainer.agents:
        cells = []
        if evaluations:
            before, after = (evaluation[f"eval_{name}/reward"] for evaluation in evaluations)
            cells = [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        table.add_row(name, *cells, f"{trainer.token_totals[f'{name}/tokens/generated']:,.0f}")
    console.print(table)

    def say(line: str):
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    if evaluations:
        size, samples = len(trainer.eval_dataset), args.num_generations_eval
        say(f"before, after: mean reward on {size} held-out prompts, {samples} samples each")
    for name in trainer.agents:
        say(f"{name}: {Path(args.output_dir) / name}")
    if (checkpoint := get_last_checkpoint(args.output_dir)) is not None:
        say(f"last checkpoint: {checkpoint}")


def run_training(script_args: ScriptArguments, training_args: HACPOConfig):
    """Trains as the arguments say, and tells what came out."""
    console = main_console(training_args)
    # Of what is put together here, servers and launchers that do not fit raise RuntimeErrors.
    with user_errors(RuntimeError):
        trainer = make_trainer(script_args, training_args, console)
    evaluations = train(trainer, script_args.resume)
    print_summary(console, trainer, evaluations)
    if script_args.is_embedded_default:
        console.print(NEXT_STEPS, soft_wrap=True, highlight=False, markup=False)
