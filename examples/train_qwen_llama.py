"""Trains two (or more) language models together with HACPO.

On a laptop, two tiny policies on a procedural task, made here on first use:

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/train_qwen_llama.py \
        --config configs/recipes/tiny.yaml

For real, Qwen3-4B-Base and Llama-3.2-3B-Instruct on MATH, on 8 GPUs, of which four train and four serve vLLM:

    python -m hacpo_trl.serve --config configs/recipes/qwen3_4b_llama3_2_3b.yaml &
    CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --config_file configs/accelerate/zero3.yaml --num_processes 4 \
        examples/train_qwen_llama.py --config configs/recipes/qwen3_4b_llama3_2_3b.yaml

The command line wins over the recipe: `--delta 0.2 --output_dir outputs/delta`. After a break, `--resume` continues.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import transformers
from datasets import concatenate_datasets
from rich.console import Console
from rich.table import Table
from transformers.trainer_utils import get_last_checkpoint
from trl import TrlParser

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.embedded import EMBEDDED, conv_dataset, conv_reward, policy_path
from hacpo_trl.evaluation.benchmarks import BENCHMARKS, load_problems
from hacpo_trl.rewards import math_reward


@dataclass
class ScriptArguments:
    """What to train on, and how to look at it."""

    task: Literal["conv", "math"] = field(
        default="conv",
        metadata={
            "help": "'conv', the embedded procedural task, or 'math', problems whose boxed answers are checked."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "What the task 'math' trains on: a benchmark (math_train, gsm8k_train ...), the id of a dataset "
            "on the Hub, or a .jsonl or .parquet file."
        },
    )
    test_dataset_name: list[str] | None = field(
        default=None,
        metadata={"help": "What it is evaluated on, one or several. Default: dataset_name's dataset_test_split."},
    )
    dataset_columns: str | None = field(
        default=None,
        metadata={"help": "Columns of ids and files, if they have other names: problem=question,answer=final."},
    )
    dataset_train_split: str | None = field(default=None, metadata={"help": "Split to train on, of an id."})
    dataset_test_split: str | None = field(default=None, metadata={"help": "Split to evaluate on, of an id."})
    train_size: int | None = field(default=None, metadata={"help": "Train on so many prompts at most."})
    test_size: int | None = field(default=256, metadata={"help": "Evaluate on so many held-out prompts at most."})
    resume: bool = field(default=False, metadata={"help": "Continue from the last checkpoint in output_dir."})


def conv_task(script_args: ScriptArguments, training_args: HACPOConfig):
    """The embedded task: three symbols, their three digits (see `hacpo_trl.embedded`)."""
    train = conv_dataset("train", script_args.train_size or 5000, training_args.seed)
    return train, conv_dataset("test", script_args.test_size or 512), conv_reward


def math_task(script_args: ScriptArguments, training_args: HACPOConfig):
    """Problems asked for step by step with a boxed answer, which is compared as mathematics with the gold answer."""
    train_name, test_names = script_args.dataset_name, script_args.test_dataset_name
    if train_name is None:
        raise ValueError("task 'math' needs dataset_name, such as math_train.")
    if test_names is None and script_args.dataset_test_split is None:
        raise ValueError(
            "task 'math' needs held-out problems: test_dataset_name, such as math500, or dataset_test_split."
        )

    def load(name: str, split: str | None, size: int | None):
        columns = None if name in BENCHMARKS else script_args.dataset_columns
        return load_problems(name, split=split, columns=columns, max_rows=size)

    train = load(train_name, script_args.dataset_train_split, script_args.train_size)
    tests = [load(name, script_args.dataset_test_split, script_args.test_size) for name in test_names or [train_name]]
    return train, concatenate_datasets(tests), math_reward


def with_embedded_policies(training_args: HACPOConfig, console: Console) -> HACPOConfig:
    """Makes the policies that agents name as `embedded:...` and puts their paths in place."""
    agents = []
    for agent in training_args.agents:
        path = agent.model_name_or_path or ""
        if path.startswith(EMBEDDED):
            with training_args.main_process_first(desc="making embedded policies"):
                path = policy_path(path.removeprefix(EMBEDDED), training_args.seed, progress=console.print)
            agent = replace(agent, model_name_or_path=path)
        agents.append(agent)
    return replace(training_args, agents=agents)


def print_summary(console: Console, trainer: HACPOTrainer, before: dict[str, float], after: dict[str, float]):
    """Held-out accuracy before and after, tokens, and where the agents are."""
    args = trainer.args
    table = Table(title=f"{args.algorithm.upper()} after {trainer.state.global_step} updates of each agent")
    table.add_column("agent")
    for column in ("before", "after", "gain", "tokens generated"):
        table.add_column(column, justify="right")
    for name in trainer.agents:
        key = f"eval_{name}/reward"
        generated = trainer.token_totals[f"{name}/tokens/generated"]
        gain = after[key] - before[key]
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}", f"{gain:+.3f}", f"{generated:,.0f}")
    console.print(table)
    size, samples = len(trainer.eval_dataset), args.num_generations_eval
    console.print(f"before, after: mean reward on {size} held-out prompts, {samples} samples each", highlight=False)
    for name in trainer.agents:
        console.print(f"{name}: {Path(args.output_dir) / name}", soft_wrap=True, highlight=False)
    checkpoint = get_last_checkpoint(args.output_dir)
    if checkpoint is not None:
        console.print(f"last checkpoint: {checkpoint}", soft_wrap=True, highlight=False)


def main(script_args: ScriptArguments, training_args: HACPOConfig):
    console = Console(quiet=training_args.process_index > 0)
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)

    training_args = replace(with_embedded_policies(training_args, console), eval_on_start=True)
    train_dataset, test_dataset, reward = {"conv": conv_task, "math": math_task}[script_args.task](
        script_args, training_args
    )
    trainer = HACPOTrainer(
        reward_funcs=reward, args=training_args, train_dataset=train_dataset, eval_dataset=test_dataset
    )
    checkpoint = get_last_checkpoint(training_args.output_dir) if script_args.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    before = next(log for log in trainer.state.log_history if "eval_reward" in log)
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    print_summary(console, trainer, before, after)
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, HACPOConfig)).parse_args_and_config())
