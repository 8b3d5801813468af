"""What may be in `generation_kwargs`: nothing with an option of its own, so that what is sampled is what is scored."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from .names import unknown_name


# Names of transformers' GenerationConfig and of vLLM's SamplingParams that another option decides, and which.
OPTION_FOR = {
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "seed": "seed",
    "eos_token_id": "an agent's eos_token",
    "stop_token_ids": "an agent's eos_token",
    "bos_token_id": "the tokenizer",
    "pad_token_id": "the tokenizer",
}
# Names that would make an answer something else than one sampled sequence, token by token.
NO_SAMPLE = {
    **dict.fromkeys(("do_sample", "num_beams", "num_beam_groups", "penalty_alpha", "dola_layers"), "are sampled"),
    **dict.fromkeys(("assistant_early_exit", "prompt_lookup_num_tokens", "token_healing"), "are sampled"),
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"), "hold no token that was not sampled"),
    **dict.fromkeys(("max_time",), "are cut by max_completion_length alone"),
}
# Names that say what generation returns and how it runs, which the trainer decides.
TRAINERS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("disable_compile", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "skip_special_tokens"),
)
STOP_STRINGS = {False: "stop_strings", True: "stop"}


def check_generation_kwargs(kwargs: Mapping[str, Any], use_vllm: bool, whose: str = ""):
    """Raises a `ValueError` that names the first key which has no place in `generation_kwargs`.

    Args:
        kwargs: Of the run or of one agent.
        use_vllm: Whether they are vLLM's SamplingParams, or transformers' GenerationConfig.
        whose: `"Agent 'qwen': "`, or nothing for the run's.
    """
    known = vars(GenerationConfig())
    for key in kwargs:
        if key in OPTION_FOR:
            raise ValueError(
                f"{whose}generation_kwargs has {key!r}, which {OPTION_FOR[key]} decides. Set that instead."
            )
        if key in NO_SAMPLE:
            raise ValueError(f"{whose}generation_kwargs has {key!r}, but rollouts {NO_SAMPLE[key]}. Leave it out.")
        if key in TRAINERS:
            raise ValueError(f"{whose}generation_kwargs has {key!r}, which the trainer sets itself. Leave it out.")
        if key == STOP_STRINGS[not use_vllm]:
            sampler = "vLLM" if use_vllm else "transformers"
            raise ValueError(f"{whose}generation_kwargs has {key!r}; {sampler} calls it {STOP_STRINGS[use_vllm]!r}.")
        if not use_vllm and key not in known:
            raise ValueError(f"{whose}generation_kwargs: {unknown_name(key, sorted(known), 'key')}")
    stop_strings_of(kwargs, use_vllm, whose)


def stop_strings_of(kwargs: Mapping[str, Any], use_vllm: bool, whose: str = "") -> list[str]:
    """The strings that end an answer."""
    given = kwargs.get(STOP_STRINGS[use_vllm]) or []
    strings = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"{whose}{STOP_STRINGS[use_vllm]} must be a text or a list of texts, not {given!r}.")
    return strings
