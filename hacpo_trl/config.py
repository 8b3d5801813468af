"""Configuration: `HACPOConfig` for the run, `AgentConfig` for each agent."""

import inspect
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.utils.generic import strtobool

from .algorithm.sharing import RULES, SharingRule
from .options.agent import AgentConfig, parse_agents
from .options.checks import check_settings
from .options.grpo_names import unknown_setting
from .options.kinds import convert_fields
from .options.step import StepPlan, plan_step
from .options.vllm import validate_vllm


__all__ = ["AgentConfig", "HACPOConfig"]


@dataclass
class HACPOConfig(TrainingArguments):
    """Arguments of [`HACPOTrainer`]: transformers' `TrainingArguments`, GRPOConfig's names, and HACPO's own.

    > Differing defaults

    As in TRL: `learning_rate` 1e-6, `logging_steps` 10, `remove_unused_columns` False; `bf16` and
    `gradient_checkpointing` default to True with an accelerator and to False without. `use_cpu` is set when there is
    no accelerator. `per_device_train_batch_size` x `gradient_accumulation_steps` x processes rollouts make one
    optimizer update of each agent.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # --- Defaults that differ from TrainingArguments -------------------------------------------------------------
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of every agent without its own."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer updates."})
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must stay False: reward functions read the dataset's further columns."}
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 mixed precision. Default: True with an accelerator, False without."}
    )
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={
            "help": "Recompute activations in the backward pass. Default: True with an accelerator, else False."
        },
    )

    # --- Agents ---------------------------------------------------------------------------------------------------
    agents: list | str | None = field(
        default=None,
        metadata={
            "help": "The agents: a list of AgentConfig or of mappings (YAML), or JSON text on the command line. Each "
            "needs a `name`, and a `model_name_or_path` unless the trainer is given the models."
        },
    )
    model_init_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Keyword arguments of `from_pretrained` for every agent's model."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow models and tokenizers that ship Python code of their own."}
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Switch dropout off in all policies. With False, old log-probabilities are those of the whole "
            "policy and new ones those of a thinned-out one: ratios leave the clip range before any update."
        },
    )

    # --- The step -------------------------------------------------------------------------------------------------
    algorithm: Literal["hacpo", "naive", "gspo", "grpo"] = field(
        default="hacpo",
        metadata={
            "help": "'hacpo'; 'naive': pooled rollouts without any correction; 'gspo' and 'grpo': every agent on its "
            "own rollouts alone."
        },
    )
    prompts_per_step: int | None = field(
        default=None,
        metadata={
            "help": "B, prompts of one step over all processes. Default: as many as make the rollouts of one agent "
            "fill one optimizer update."
        },
    )
    num_generations: int = field(default=8, metadata={"help": "G, rollouts of each agent for each prompt."})
    num_generations_eval: int | None = field(
        default=None, metadata={"help": "Rollouts for each prompt in evaluation. Default: num_generations."}
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle the prompts anew in every epoch."})

    # --- Sampling -------------------------------------------------------------------------------------------------
    max_completion_length: int = field(default=512, metadata={"help": "Longest answer, in the agent's tokens."})
    temperature: float = field(
        default=1.0, metadata={"help": "Sampling temperature, also that of all log-probabilities."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1 keeps every token."})
    top_k: int = field(default=0, metadata={"help": "Sample among the k most likely tokens; 0 keeps every token."})
    min_p: float | None = field(
        default=None, metadata={"help": "Least probability of a token, relative to the most likely one's."}
    )
    repetition_penalty: float = field(default=1.0, metadata={"help": "1 penalizes nothing."})
    generation_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of transformers' GenerationConfig, such as stop_strings, or of vLLM's "
            "SamplingParams, such as stop. What has an option of its own is refused."
        },
    )
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "Keyword arguments of every chat template, such as {'enable_thinking': false}."},
    )
    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "Gather ZeRO-3 weights once for a whole generation instead of layer by layer."}
    )

    # --- vLLM -----------------------------------------------------------------------------------------------------
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM instead of transformers' generate."})
    vllm_mode: Literal["colocate", "server"] = field(
        default="colocate",
        metadata={
            "help": "'server': a vLLM server for each agent, at its vllm_server_base_url (`hacpo serve` "
            "starts them); 'colocate': an engine for each agent in every training process, on its GPU."
        },
    )
    vllm_server_timeout: float = field(
        default=240.0, metadata={"help": "Seconds to wait for a server to be up, at the start and after it failed."}
    )
    vllm_generation_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that a server may take for the answers to one process's prompts."}
    )
    vllm_sync_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that each step of sending weights to a server may take."}
    )
    vllm_group_host: str | None = field(
        default=None,
        metadata={
            "help": "Address of the first training process's machine at which servers join to receive weights; "
            "nothing listens at its others. Default: the one that each server is reached from."
        },
    )
    vllm_gpu_memory_utilization: float = field(
        default=0.3, metadata={"help": "Share of a GPU's memory for each agent's colocated engine."}
    )
    vllm_tensor_parallel_size: int = field(
        default=1, metadata={"help": "Over how many GPUs each colocated engine is spread."}
    )
    vllm_enable_sleep_mode: bool = field(
        default=False,
        metadata={"help": "Colocated engines give their memory to training between generations."},
    )
    vllm_model_impl: Literal["vllm", "transformers"] = field(
        default="vllm", metadata={"help": "Whose implementation of the models colocated engines run."}
    )
    old_logprobs: Literal["recompute", "sampler"] = field(
        default="recompute",
        metadata={
            "help": "Where log π_old comes from: 'recompute' from the trainer's own forward pass, 'sampler' from "
            "vLLM, which saves that pass and trusts that both compute alike (watch sampling/logp_difference)."
        },
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "Weigh own rollouts by what the trainer's and vLLM's probabilities differ by, as in TRL."},
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        field(
            default="sequence_mask",
            metadata={"help": "The ratio of each token or of the whole answer; beyond the bounds cut to them or 0."},
        )
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper bound of the correction."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower bound of the correction."}
    )

    # --- Rewards --------------------------------------------------------------------------------------------------
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "A weight for each reward function. Default: 1 for each."}
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a reward function may take before the run ends in an error that names "
            "it. Functions that are not async then run on threads of their own."
        },
    )
    rewards_see_special_tokens: bool = field(
        default=False,
        metadata={
            "help": "Reward functions get the answers' texts with special tokens, for tasks whose tags are special "
            "tokens. Peers never do."
        },
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={"help": "Give answers cut by length no part in the loss; they still count in its mean."},
    )

    # --- Own rollouts ---------------------------------------------------------------------------------------------
    epsilon: float | None = field(
        default=None,
        metadata={"help": "Clip range below 1 of own ratios. Default: 3e-4 for sequence ratios, 0.2 for grpo."},
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={"help": "Clip range above 1. Default: epsilon if that is given, else 4e-4 (0.28 for grpo)."},
    )
    beta: float = field(
        default=0.0, metadata={"help": "Weight of the KL divergence to the initial policy, on own rollouts."}
    )
    use_bias_correction_kl: bool = field(
        default=True, metadata={"help": "Weigh the KL divergence by the importance ratio, as GRPOTrainer does."}
    )

    # --- HACPO ----------------------------------------------------------------------------------------------------
    alpha: float = field(
        default=1.0, metadata={"help": "α: a peer's rollout is damped by sg(s)^α (Eq. 12). 0 damps nothing."}
    )
    delta: float = field(
        default=0.2,
        metadata={
            "help": "δ: cross ratios below 1 - δ + m·δ_step are discarded (Eq. 13). The paper sets 0.2 in practice; "
            "its Table 5's 0.8 and 0.9 are the bound 1 - δ, at which its authors' code clips. Watch "
            "clip_ratio/cross_below."
        },
    )
    delta_step: float = field(
        default=0.025, metadata={"help": "δ_step: the bound tightens by this at each update of a step (Eq. 14)."}
    )
    clip_cross: bool = field(default=True, metadata={"help": "False: peers' ratios are not clipped (ablation)."})
    capability_window: int = field(
        default=5, metadata={"help": "K: a capability is the mean reward of the last K steps (Eq. 9)."}
    )
    capability_metric: Literal["mean_reward", "success_rate"] = field(
        default="mean_reward",
        metadata={"help": "What a capability averages: rewards, or whether they are above 0 (for negative rewards)."},
    )
    advantage_baseline: Literal["capability", "own", "shrinkage"] = field(
        default="capability",
        metadata={
            "help": "'capability': Eq. 6; 'own': mean and std of the learner's own group (ablation, Table 2); "
            "'shrinkage': the learner's leave-one-out mean on the prompt and its peers' capability-scaled mean, "
            "weighted by what predicts the learner's rewards of the step best (not the paper's)."
        },
    )
    cross_advantage: Literal["learner", "source"] = field(
        default="learner",
        metadata={
            "help": "Whose baseline a peer's rollout is measured by: the learner's (Eq. 50) or the source's (Eq. 10)."
        },
    )
    capability_weighting: bool = field(
        default=True,
        metadata={"help": "Weigh a peer's rollouts by ω^(j,k) (Eq. 10); False is the ablation of Table 3."},
    )
    ratio_normalization: Literal["source", "own", "bytes"] = field(
        default="source",
        metadata={
            "help": "The divisor of the sequence ratio: the source's token count for both sums (Eq. 11), each sum's "
            "own count (the authors' code and the paper's second version), or the text's bytes for both, times the "
            "learner's mean bytes a token over the step."
        },
    )
    minibatch_order: Literal["mixed", "self_first"] = field(
        default="mixed",
        metadata={
            "help": "'mixed': every update holds own and peers' rollouts of the same prompts (Eq. 53); 'self_first': "
            "own rollouts in a step's first updates, peers' in the later ones (the authors' code)."
        },
    )
    naive_old_logprobs: Literal["learner", "source"] = field(
        default="learner",
        metadata={
            "help": "With algorithm='naive': the old log-probabilities of peers' rollouts, recomputed by the learner "
            "or taken from the source."
        },
    )

    # --- Logging --------------------------------------------------------------------------------------------------
    log_completions: bool = field(
        default=False,
        metadata={"help": "Print a sample of prompts and answers at every log, and save them all as parquet."},
    )
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "How many answers of each agent to print. Default: all of the last step."}
    )

    def __new__(cls, *args, **kwargs):
        # Dataclasses name an unknown argument; this names the one that was meant, or what to write for one of TRL's.
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if not takes_any and (unknown := next((name for name in kwargs if name not in parameters), None)):
            known = [name for name in parameters if name != "self"]
            raise TypeError(f"{cls.__name__}: {unknown_setting(unknown, known)}")
        return super().__new__(cls)

    def __post_init__(self):
        convert_fields(self)
        if str(self.resume_from_checkpoint).lower() in ("true", "false"):
            self.resume_from_checkpoint = bool(strtobool(str(self.resume_from_checkpoint)))
        accelerated = torch.accelerator.is_available()
        if not accelerated:
            self._prepare_for_cpu()
        if self.bf16 is None:
            self.bf16 = accelerated and not self.use_cpu and not self.fp16
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = accelerated and not self.use_cpu
        if hasattr(self, "activation_checkpointing") and self.activation_checkpointing is None:
            # transformers 5.24 renames the option and warns about the old name, which TRL's users know.
            self.activation_checkpointing = self.gradient_checkpointing
        self.agents = parse_agents(self.agents)
        super().__post_init__()

        check_settings(self)
        validate_vllm(self)

        if self.epsilon_high is None and self.epsilon is not None:
            self.epsilon_high = self.epsilon
        epsilon, epsilon_high = RULES[self.algorithm].default_epsilon
        self.epsilon = epsilon if self.epsilon is None else self.epsilon
        self.epsilon_high = epsilon_high if self.epsilon_high is None else self.epsilon_high
        if self.num_generations_eval is None:
            self.num_generations_eval = self.num_generations

    def _prepare_for_cpu(self):
        """Makes several processes on a machine without an accelerator one run, and not several runs of one process."""
        self.dataloader_pin_memory = False
        if not (self.deepspeed or strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))):
            self.use_cpu = True
            if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
                # Transformers would leave ddp_timeout out where there is no accelerator.
                dist.init_process_group(self.ddp_backend or "gloo", timeout=timedelta(seconds=self.ddp_timeout))
            return
        # DeepSpeed chooses its device itself, and would compile its shared-memory communication first, for minutes.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
        self.ddp_backend = self.ddp_backend or "gloo"

    def default_of(self, name: str) -> Any:
        """The default of one of the options."""
        return next(f.default for f in fields(type(self)) if f.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as plain data, for loggers and JSON."""
        agents = [asdict(agent) for agent in self.agent_configs] if self.agents is not None else None
        return {**super().to_dict(), "agents": agents}

    @property
    def agent_configs(self) -> list[AgentConfig]:
        """`agents` as they were parsed; none where the trainer is given models alone."""
        return [agent for agent in self.agents or () if isinstance(agent, AgentConfig)]

    @property
    def order_seed(self) -> int | None:
        """Seed of the prompts' order, `data_seed` or else `seed`; None keeps the dataset's order."""
        if not self.shuffle_dataset:
            return None
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def rule(self) -> SharingRule:
        """The algorithm with its settings: what a learner makes of its peers' rollouts."""
        return RULES[self.algorithm].from_settings(self)

    @property
    def shares_rollouts(self) -> bool:
        """Whether agents learn from each other's rollouts."""
        return self.rule.shares

    def step_plan(self, num_agents: int) -> StepPlan:
        """The arithmetic of one step for n agents; an error says which numbers would work."""
        return plan_step(
            num_agents,
            self.world_size,
            self.shares_rollouts,
            self.prompts_per_step,
            self.num_generations,
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
        )
