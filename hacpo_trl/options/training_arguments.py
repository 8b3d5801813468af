"""What each field of transformers' `TrainingArguments` means here: a decision for every one.

A test holds them against the installed version, so that no new field slips in unread.
"""

from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments


# Fields that work as transformers documents them.
WORKS = {
    *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
    *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("bf16", "tf32", "use_cpu", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
    *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
    *("hub_revision", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *("seed", "data_seed", "full_determinism", "skip_memory_metrics", "local_rank", "ddp_timeout"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "fsdp", "fsdp_config", "deepspeed"),
    # Incomplete steps are left out whatever it says; transformers sets it without being asked.
    "dataloader_drop_last",
    # Set by transformers itself where there is an eval_strategy.
    "do_eval",
    # What `train` resumes from where it is told nothing.
    "resume_from_checkpoint",
}
# Fields that are checked by `checks.py`, or in part below.
CHECKED = {"fp16", "auto_find_batch_size", "remove_unused_columns", "accelerator_config"}
# Fields that have no meaning here, and why: any other value than their default is refused.
NO_MEANING = {
    "neftune_noise_alpha": "it would put noise into new log-probabilities and none into old ones",
    "label_smoothing_factor": "there are no labels: the loss is the policy objective",
    "label_names": "there are no labels: reward functions get the dataset's columns",
    "prediction_loss_only": "evaluation samples answers and scores them",
    "eval_do_concat_batches": "evaluation samples answers and scores them",
    "eval_use_gather_object": "evaluation samples answers and scores them",
    "eval_accumulation_steps": "evaluation samples answers and scores them",
    "include_for_metrics": "evaluation samples answers and scores them",
    "batch_eval_metrics": "evaluation samples answers and scores them",
    "bf16_full_eval": "evaluation samples from the policies as they train; set dtype in model_init_kwargs",
    "fp16_full_eval": "evaluation samples from the policies as they train; set dtype in model_init_kwargs",
    "average_tokens_across_devices": "the loss is a mean over rollouts, of all processes",
    "include_num_input_tokens_seen": "tokens are counted by agent, in tokens/generated, scored and trained",
    "train_sampling_strategy": "prompts come in the order of shuffle_dataset",
    "length_column_name": "prompts come in the order of shuffle_dataset",
    "use_liger_kernel": "it patches the one model of a Trainer; load the models with it yourself",
    "liger_kernel_config": "it patches the one model of a Trainer; load the models with it yourself",
    "use_cache": "generation always uses a cache, training never",
    "torch_empty_cache_steps": "the training step is not transformers'",
    "debug": "it watches the one model of a Trainer",
    "parallelism_config": "log-probabilities of whole answers are needed on one process",
    "enable_jit_checkpoint": "a run that gets SIGTERM, SIGUSR1 or Ctrl-C always saves a checkpoint and stops",
    "do_train": "call trainer.train()",
    "do_predict": "call trainer.evaluate()",
}
# Of accelerator_config: the same.
NO_MEANING_TO_ACCELERATOR = {
    "split_batches": "a step's prompts are dealt to processes by their own sampler",
    "dispatch_batches": "a step's prompts are dealt to processes by their own sampler",
}


def check_training_arguments(args: Any):
    """Raises a `ValueError` that names the first setting of transformers without a meaning here. `args`: a
    `HACPOConfig` after transformers has read it."""
    for field in fields(TrainingArguments):
        if field.name in NO_MEANING and not _is_default(getattr(args, field.name), field):
            raise ValueError(
                f"{field.name}={getattr(args, field.name)!r} has no effect: {NO_MEANING[field.name]}. Leave it out."
            )
    for name, reason in NO_MEANING_TO_ACCELERATOR.items():
        if getattr(args.accelerator_config, name, None):
            raise ValueError(f"accelerator_config has {name}, which has no effect: {reason}. Leave it out.")


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default is not MISSING else field.default_factory()
    # Transformers turns some defaults into lists and enumerations.
    return value == default or (not value and not default) or str(value) == str(default)
