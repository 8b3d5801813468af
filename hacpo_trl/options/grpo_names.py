"""Names that other TRL scripts know and a run here does not: what to write instead.

A recipe of `trl grpo` is where most recipes come from. `GRPO_NAMES` has an entry for every field of `trl.GRPOConfig`
that `HACPOConfig` lacks, `SCRIPT_NAMES` for those of `trl.ModelConfig` and of TRL's scripts; the tests hold both
complete. What stands between backticks can be written as it is.
"""

from collections.abc import Sequence
from dataclasses import fields

from .agent import AgentConfig
from .names import unknown_name


_LEAVE_OUT = "Leave it out"
_ENTROPY = f"{_LEAVE_OUT}: the objective has no entropy term."
_LOSS = f"{_LEAVE_OUT}: it belongs to a loss_type that is not implemented here."
_REFERENCE = f"{_LEAVE_OUT}: the reference of `beta: 0.001` is always the initial policy."
_STEP = "Write `prompts_per_step: 128`, the prompts of one step; how many updates a step has follows from it."
_CONTINUOUS = f"{_LEAVE_OUT}; `use_vllm: true` samples with continuous batching."
_SERVER = (
    "Each agent has a server of its own: write `vllm_server_base_url: http://localhost:8001` under each of `agents`."
)

GRPO_NAMES = {
    "router_aux_loss_coef": f"{_LEAVE_OUT}: the objective has no load-balancing loss.",
    "cast_lm_head_to_fp32": f"{_LEAVE_OUT}, or load whole models so: `model_init_kwargs: {{dtype: float32}}`.",
    "pad_to_multiple_of": f"{_LEAVE_OUT}: batches are padded to their longest answer.",
    "generation_batch_size": _STEP,
    "steps_per_generation": _STEP,
    "cache_implementation": "Write `generation_kwargs: {cache_implementation: static}`.",
    "vllm_structured_outputs_regex": f"{_LEAVE_OUT}: structured outputs are not supported.",
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_group_port": "Each agent has its own: write `vllm_group_port: 51216` under each of `agents`.",
    "vllm_max_model_length": "Each agent has its own: write `max_model_length: 5120` under each of `agents`.",
    "num_iterations": f"{_LEAVE_OUT}: a step's rollouts are trained on once. {_STEP}",
    "sapo_temperature_neg": _LOSS,
    "sapo_temperature_pos": _LOSS,
    "vespo_k_pos": _LOSS,
    "vespo_lambda_pos": _LOSS,
    "vespo_k_neg": _LOSS,
    "vespo_lambda_neg": _LOSS,
    "importance_sampling_level": "HACPO's ratios are of sequences, as in `algorithm: gspo`; `algorithm: grpo` has "
    "those of tokens.",
    "multi_objective_aggregation": f"{_LEAVE_OUT}: rewards are summed as `reward_weights: [1.0, 0.5]` says, then "
    "normalized.",
    "scale_rewards": f"{_LEAVE_OUT}: advantages are scaled by the standard deviation of their group.",
    "loss_type": f"{_LEAVE_OUT}: losses are means over each answer, then over answers, as TRL's 'grpo'.",
    "sync_ref_model": _REFERENCE,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "top_entropy_quantile": f"{_LEAVE_OUT}: every token of an answer counts.",
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_delta": _ENTROPY,
    "entropy_target": _ENTROPY,
    "max_tool_calling_iterations": f"{_LEAVE_OUT}: agents call no tools.",
    "off_policy_mask_threshold": f"{_LEAVE_OUT}; peers' answers that have become unlikely are discarded by "
    "`delta: 0.2`.",
    "log_multimodal": f"{_LEAVE_OUT}: prompts are text.",
    "log_unique_prompts": f"{_LEAVE_OUT}; `num_completions_to_print: 4` prints fewer.",
    "log_completions_hub_repo": "Write `log_completions: true`, which saves them in output_dir.",
    "use_transformers_continuous_batching": _CONTINUOUS,
    "transformers_continuous_batching_config": _CONTINUOUS,
    "use_transformers_paged": _CONTINUOUS,
    "vllm_importance_sampling_cap": "Write `vllm_importance_sampling_clip_max: 3.0`.",
}

_ADAPTER = "Write `peft_config: {r: 16, lora_alpha: 32, target_modules: all-linear}` under an agent of `agents`."
_QUANTIZED = f"{_LEAVE_OUT}: policies are not quantized."

SCRIPT_NAMES = {
    "model_revision": "Write `model_init_kwargs: {revision: main}`, for all agents or under one.",
    "dtype": "Write `model_init_kwargs: {dtype: bfloat16}`, for all agents or under one.",
    "attn_implementation": "Write `model_init_kwargs: {attn_implementation: sdpa}`, for all agents or under one.",
    "use_peft": _ADAPTER,
    "lora_r": _ADAPTER,
    "lora_alpha": _ADAPTER,
    "lora_dropout": _ADAPTER,
    "lora_target_modules": _ADAPTER,
    "lora_target_parameters": _ADAPTER,
    "lora_modules_to_save": _ADAPTER,
    "lora_task_type": _ADAPTER,
    "use_rslora": _ADAPTER,
    "use_dora": _ADAPTER,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "bnb_4bit_quant_type": _QUANTIZED,
    "use_bnb_nested_quant": _QUANTIZED,
    "bnb_4bit_quant_storage": _QUANTIZED,
    "dataset_streaming": f"{_LEAVE_OUT}: datasets are loaded whole. A stream is returned by a function of one's own: "
    "`task: my_tasks:stream`.",
    "ignore_bias_buffers": f"{_LEAVE_OUT}: no policy is wrapped in a way that needs it.",
    "reward_model_name_or_path": "Write `reward_funcs: [org/model]`, an id among the reward functions.",
}


def unknown_setting(name: str, known: Sequence[str], kind: str = "setting") -> str:
    """About a name that a run does not have: what to write for one of TRL's or of an agent's, else the nearest one.

    Args:
        name: What was given.
        known: What there is.
        kind: What it should name, such as "setting".
    """
    advice = GRPO_NAMES.get(name) or SCRIPT_NAMES.get(name)
    if advice is None and name in {field.name for field in fields(AgentConfig)}:
        advice = f"It is an agent's own: write `{name}` under an agent of `agents`."
    return f"unknown {kind} {name!r}. {advice}" if advice else unknown_name(name, known, kind)
