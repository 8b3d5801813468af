"""Trains two (or more) language models together with HACPO: a script of one's own, over the pieces of `hacpo train`.

    python examples/train_qwen_llama.py                                         # two tiny models, on any machine
    accelerate launch --config_file configs/accelerate/zero3.yaml --num_processes 4 \
        examples/train_qwen_llama.py --config configs/recipes/qwen3_4b_llama3_2_3b.yaml

The second line trains Qwen3-4B-Base and Llama-3.2-3B-Instruct on MATH, on four GPUs; four more serve them by vLLM:
`hacpo serve --config qwen3-4b+llama3.2-3b`. The command line wins over the recipe: `--delta 0.2 --output_dir
outputs/delta`. After a break, `--resume` continues.

`hacpo train` takes the same recipes and options, and can start launcher and servers itself.
"""

from dataclasses import replace

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.commands.errors import user_errors
from hacpo_trl.commands.tasks import load_task
from hacpo_trl.commands.train_options import ScriptArguments, parse_arguments
from hacpo_trl.commands.training import NEXT_STEPS, main_console, print_summary, train, with_embedded_policies


def main(script_args: ScriptArguments, training_args: HACPOConfig):
    console = main_console(training_args)
    training_args = with_embedded_policies(training_args, console)
    # Whatever makes a dataset with a column `prompt`, and a reward of what is answered, can stand in this place.
    train_dataset, eval_dataset, reward_funcs = load_task(script_args, training_args)
    trainer = HACPOTrainer(
        reward_funcs=reward_funcs,
        args=replace(training_args, eval_on_start=eval_dataset is not None),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    evaluations = train(trainer, script_args.resume)
    print_summary(console, trainer, evaluations)
    if script_args.is_embedded_default:
        console.print(NEXT_STEPS, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    with user_errors():
        arguments = parse_arguments()
    main(*arguments)
