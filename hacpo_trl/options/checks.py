"""Checks of a run's settings as a whole: what cannot work, and what would be without effect, is refused by name.

What belongs to one part is checked beside it: an agent's settings (`agent.py`), the arithmetic of a step (`step.py`),
vLLM (`vllm.py`).
"""

from typing import Any

from ..algorithm.sharing import RULES
from .generation import check_generation_kwargs
from .training_arguments import check_training_arguments


def _readers(option: str) -> tuple[str, ...]:
    return tuple(name for name, rule in RULES.items() if option in rule.options())


# By option, the algorithms that read it, where not all do. Setting one in another algorithm is an error.
OPTIONS_OF = {option: _readers(option) for rule in RULES.values() for option in rule.options()}


def check_settings(args: Any):
    """Raises a `ValueError` for the first setting that is wrong, which names it, its value and what would be right.

    Args:
        args: A `HACPOConfig`.
    """
    check_training_arguments(args)
    _check_numbers(args)
    _check_unused_options(args)
    check_generation_kwargs(args.generation_kwargs or {}, args.use_vllm)
    for agent in args.agents or []:
        check_generation_kwargs(agent.generation_kwargs or {}, args.use_vllm, f"Agent '{agent.name}': ")


def _check_numbers(args: Any):
    if args.num_generations < 2:
        raise ValueError(
            f"num_generations must be at least 2, not {args.num_generations}: a lone rollout has no group to be "
            "compared with."
        )
    at_least_one = ("max_completion_length", "capability_window", "prompts_per_step", "num_generations_eval")
    for name in at_least_one:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}.")
    for name in ("alpha", "delta", "delta_step", "beta", "epsilon", "epsilon_high"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} must not be negative, but is {value}.")
    if args.reward_timeout is not None and args.reward_timeout <= 0:
        raise ValueError(f"reward_timeout must be above 0 seconds, not {args.reward_timeout}.")
    if args.delta > 1:
        raise ValueError(f"delta must be at most 1, not {args.delta}: it is the clip radius below a ratio of 1.")
    temperatures = {"temperature": args.temperature}
    temperatures.update({f"temperature of agent '{a.name}'": a.temperature for a in args.agent_configs})
    for name, value in temperatures.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, not {value}: training samples its rollouts.")
    if args.remove_unused_columns:
        raise ValueError("remove_unused_columns must be False: reward functions read the dataset's columns.")
    if args.fp16:
        raise ValueError("fp16 is not supported: every agent would need a loss scaler of its own. Use bf16.")
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size is not supported: a smaller batch would cut a step into other updates. Lower "
            "per_device_train_batch_size and raise gradient_accumulation_steps instead."
        )
    if args.eval_strategy != "no" and args.load_best_model_at_end and args.metric_for_best_model in (None, "loss"):
        raise ValueError(
            "load_best_model_at_end needs metric_for_best_model, such as 'reward' (the agents' mean) or "
            "'<agent>/reward'; HACPO's evaluation has no loss."
        )


def _check_unused_options(args: Any):
    for name, algorithms in OPTIONS_OF.items():
        if args.algorithm not in algorithms and getattr(args, name) != args.default_of(name):
            raise ValueError(
                f"{name}={getattr(args, name)!r} has no effect with algorithm='{args.algorithm}'. Leave it out; "
                f"it belongs to {' and '.join(algorithms)}."
            )
    if not args.clip_cross and any(getattr(args, name) != args.default_of(name) for name in ("delta", "delta_step")):
        raise ValueError("delta and delta_step have no effect with clip_cross=False. Leave them out.")
    if args.advantage_baseline == "own" and not args.capability_weighting:
        for name in ("capability_window", "capability_metric"):
            if getattr(args, name) != args.default_of(name):
                raise ValueError(
                    f"{name} has no effect with advantage_baseline='own' and capability_weighting=False, which "
                    "use no capability. Leave it out."
                )
    if args.algorithm == "naive" and args.naive_old_logprobs == "learner" and args.ratio_normalization == "own":
        raise ValueError(
            "ratio_normalization='own' has no effect with naive_old_logprobs='learner', where both sums run over the "
            "learner's tokens. Leave it out."
        )
    if args.data_seed is not None and not args.shuffle_dataset:
        raise ValueError("data_seed has no effect with shuffle_dataset=False. Leave it out.")
    if args.num_completions_to_print is not None and not args.log_completions:
        raise ValueError("num_completions_to_print has no effect without log_completions=True.")
