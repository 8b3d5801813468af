"""Configuration: `HACPOConfig` for the run, `AgentConfig` for each agent."""

import difflib
import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from transformers import TrainingArguments
from transformers.utils.generic import strtobool

from .vllm_options import validate_vllm


Algorithm = Literal["hacpo", "naive", "gspo", "grpo"]

# GSPO's clip range holds sequence ratios, which stay within a fraction of a percent of 1; GRPO's holds token ratios.
SEQUENCE_EPSILON, SEQUENCE_EPSILON_HIGH = 3e-4, 4e-4
TOKEN_EPSILON, TOKEN_EPSILON_HIGH = 0.2, 0.28

# Agents' names are folder names (checkpoint-10/qwen), module names and metric prefixes (qwen/reward).
AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

# Of an agent's settings those that are numbers: YAML reads 1e-6 (no dot) as text.
AGENT_NUMBERS = (
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "vllm_server_timeout",
    "vllm_gpu_memory_utilization",
)

# Options that only some algorithms read. Setting one in another algorithm is an error, not a silent no-op.
OPTIONS_OF = {
    "alpha": ("hacpo",),
    "delta": ("hacpo",),
    "delta_step": ("hacpo",),
    "clip_cross": ("hacpo",),
    "capability_window": ("hacpo",),
    "capability_metric": ("hacpo",),
    "capability_weighting": ("hacpo",),
    "cross_advantage": ("hacpo",),
    "advantage_baseline": ("hacpo",),
    "ratio_normalization": ("hacpo", "naive"),
    "minibatch_order": ("hacpo", "naive"),
    "naive_old_logprobs": ("naive",),
}


def _parse_json(value: Any) -> Any:
    """The command line hands mappings and lists over as JSON text."""
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


@dataclass
class AgentConfig:
    """What is one agent's own. Everything left at None follows the `HACPOConfig` of the run.

    Attributes:
        name: The agent's name: its folder in checkpoints, its prefix in metrics.
        model_name_or_path: Model id on the Hub, or a local folder.
        tokenizer_name_or_path: Where the tokenizer comes from, if not from the model.
        model_init_kwargs: Keyword arguments of `from_pretrained`, on top of the run's.
        peft_config: Keyword arguments of a PEFT configuration (`peft_type` is LORA unless given); trains an adapter.
        learning_rate: Peak learning rate.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are clipped to this norm; 0 clips nothing.
        lr_scheduler_type: Learning-rate schedule.
        warmup_steps: Updates of learning-rate warm-up (a share of all updates if below 1).
        temperature: Sampling temperature, also the temperature of this agent's log-probabilities.
        top_p: Nucleus sampling, 1 keeps every token.
        top_k: Sample among the k most likely tokens, 0 keeps every token.
        min_p: Least probability of a token relative to the most likely one.
        repetition_penalty: 1 penalizes nothing.
        max_completion_length: Longest answer, in this agent's tokens.
        generation_kwargs: Further arguments of transformers' `GenerationConfig`, or of vLLM's `SamplingParams`.
        chat_template: A Jinja chat template, the path of a file that holds one, or "plain": the messages' contents,
            one after the other. For tokenizers without a template of their own.
        chat_template_kwargs: Keyword arguments of the chat template, on top of the run's.
        eos_token: The end-of-turn token, if not the tokenizer's EOS token.
        max_model_length: Longest prompt and answer together that this agent learns from, in its tokens; the model's
            context length if not given.
        hub_model_id: Repository on the Hub that `push_to_hub` pushes this agent to.
        vllm_server_base_url: Address of this agent's vLLM server, such as `http://localhost:8000`.
        vllm_group_port: On the trainer's main process, the port at which this agent's server joins to receive weights;
            51216 and the following ones, in the order of the agents, if not given.
        vllm_server_timeout: Seconds to wait for this agent's server to be up.
        vllm_server_devices: Devices that `python -m hacpo_trl.serve` starts this agent's server on: GPUs, or CPU cores
            on a machine without any, such as "0,1".
        vllm_server_args: Further arguments of `vllm serve` for it, by their names without dashes in front.
        vllm_gpu_memory_utilization: Share of a GPU's memory for this agent's colocated engine.
    """

    name: str
    model_name_or_path: str | None = None
    tokenizer_name_or_path: str | None = None
    model_init_kwargs: dict[str, Any] | None = None
    peft_config: dict[str, Any] | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    lr_scheduler_type: str | None = None
    warmup_steps: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_completion_length: int | None = None
    generation_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    eos_token: str | None = None
    max_model_length: int | None = None
    hub_model_id: str | None = None
    vllm_server_base_url: str | None = None
    vllm_group_port: int | None = None
    vllm_server_timeout: float | None = None
    vllm_server_devices: str | None = None
    vllm_server_args: dict[str, Any] | None = None
    vllm_gpu_memory_utilization: float | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not AGENT_NAME.fullmatch(self.name):
            raise ValueError(
                f"Agent name {self.name!r} will not do: it names a folder and prefixes metrics. Use letters, digits, "
                "'-' and '_', beginning with a letter or digit."
            )
        for key in AGENT_NUMBERS:
            value = getattr(self, key)
            if value is not None:
                try:
                    setattr(self, key, float(value))
                except (TypeError, ValueError):
                    raise ValueError(f"Agent '{self.name}': {key} must be a number, not {value!r}.") from None

    @classmethod
    def from_dict(cls, mapping: Any) -> "AgentConfig":
        """Reads one agent of a YAML or JSON list; an unknown or missing key is an error that names it."""
        if isinstance(mapping, AgentConfig):
            return mapping
        if not isinstance(mapping, dict):
            raise ValueError(f"Each agent must be a mapping with a 'name', not {mapping!r}.")
        known = [f.name for f in fields(cls)]
        if "name" not in mapping:
            raise ValueError(f"An agent without a 'name': {mapping!r}.")
        for key in mapping:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
                raise ValueError(f"Agent '{mapping['name']}': unknown key {key!r}. {hint}")
        return cls(**mapping)


@dataclass(frozen=True)
class StepPlan:
    """How one step's rollouts are cut into optimizer updates.

    Attributes:
        prompts: B, prompts of one step over all processes.
        rows_per_prompt: Rollouts of one prompt that a learner sees: nG, or G for algorithms that share nothing.
        rows_per_update: Rollouts of one optimizer update of an agent, over all processes and accumulation steps.
        updates: U, optimizer updates of one step.
    """

    prompts: int
    rows_per_prompt: int
    rows_per_update: int
    updates: int


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
    disable_dropout: bool = field(default=False, metadata={"help": "Switch dropout off in all policies."})

    # --- The step -------------------------------------------------------------------------------------------------
    algorithm: Algorithm = field(
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
            "help": "Further arguments of transformers' GenerationConfig, or of vLLM's SamplingParams; they win over "
            "the rest."
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
            "help": "'server': a vLLM server for each agent, at its vllm_server_base_url (`python -m hacpo_trl.serve` "
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
        default=0.8,
        metadata={
            "help": "δ: cross ratios below 1 - δ + m·δ_step are discarded (Eq. 13). 0.8 is the literal reading; the "
            "paper's text also says 'typically 0.2'. Watch clip_ratio/cross_below."
        },
    )
    delta_step: float = field(
        default=0.025, metadata={"help": "δ_step: the bound tightens by this at each update of a step (Eq. 14)."}
    )
    clip_cross: bool = field(default=True, metadata={"help": "False: peers' ratios are not clipped (ablation)."})
    capability_window: int = field(
        default=5, metadata={"help": "K: a capability is the mean reward of the last K steps (Eq. 8)."}
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
    ratio_normalization: Literal["source", "own"] = field(
        default="source",
        metadata={
            "help": "The divisor of the sequence ratio: the source's token count for both sums (Eq. 11), or each "
            "sum's own count (the authors' code)."
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

    def __post_init__(self):
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
        self.agents = self.parse_agents(self.agents)
        super().__post_init__()

        self._validate_choices()
        self._validate_numbers()
        self._validate_unused_options()
        validate_vllm(self)

        if self.epsilon_high is None and self.epsilon is not None:
            self.epsilon_high = self.epsilon
        token_level = self.algorithm == "grpo"
        if self.epsilon is None:
            self.epsilon = TOKEN_EPSILON if token_level else SEQUENCE_EPSILON
        if self.epsilon_high is None:
            self.epsilon_high = TOKEN_EPSILON_HIGH if token_level else SEQUENCE_EPSILON_HIGH
        if self.num_generations_eval is None:
            self.num_generations_eval = self.num_generations

    def _prepare_for_cpu(self):
        """Makes several processes on a machine without an accelerator one run, and not several runs of one process."""
        self.dataloader_pin_memory = False
        if not (self.deepspeed or strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))):
            self.use_cpu = True
            return
        # DeepSpeed chooses its device itself, and would compile its shared-memory communication first, for minutes.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
        self.ddp_backend = self.ddp_backend or "gloo"

    @staticmethod
    def parse_agents(agents: Any) -> list[AgentConfig] | None:
        """Agents as a recipe or the command line gives them; see `agents`."""
        if agents is None:
            return None
        if isinstance(agents, str):
            try:
                agents = json.loads(agents)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"`agents` must be a JSON list of mappings on the command line, e.g. "
                    f'\'[{{"name": "qwen", "model_name_or_path": "Qwen/Qwen3-4B-Base"}}]\', not {agents!r} ({error}).'
                ) from None
        if not isinstance(agents, (list, tuple)) or not agents:
            raise ValueError(f"`agents` must be a list of at least one agent, not {agents!r}.")
        agents = [AgentConfig.from_dict(agent) for agent in agents]
        names = [agent.name for agent in agents]
        if len(set(names)) < len(names):
            raise ValueError(f"Two agents share a name: {names}. Names must differ.")
        return agents

    def _validate_choices(self):
        for f in fields(type(self)):
            choices = getattr(f.type, "__args__", None) if getattr(f.type, "__origin__", None) is Literal else None
            if choices and getattr(self, f.name) not in choices:
                raise ValueError(f"{f.name} must be one of {', '.join(choices)}, not {getattr(self, f.name)!r}.")

    def _validate_numbers(self):
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations must be at least 2, not {self.num_generations}: a lone rollout has no group to be "
                "compared with."
            )
        at_least_one = ("max_completion_length", "capability_window", "prompts_per_step", "num_generations_eval")
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        for name in ("alpha", "delta", "delta_step", "beta", "epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, but is {value}.")
        if self.delta > 1:
            raise ValueError(f"delta must be at most 1, not {self.delta}: it is the clip radius below a ratio of 1.")
        temperatures = {"temperature": self.temperature}
        temperatures.update({f"temperature of agent '{a.name}'": a.temperature for a in self.agents or []})
        for name, value in temperatures.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}: training samples its rollouts.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns must be False: reward functions read the dataset's columns.")
        if self.fp16:
            raise ValueError("fp16 is not supported: every agent would need a loss scaler of its own. Use bf16.")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size is not supported: a smaller batch would cut a step into other updates. Lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps instead."
            )
        if self.eval_strategy != "no" and self.load_best_model_at_end and self.metric_for_best_model in (None, "loss"):
            raise ValueError(
                "load_best_model_at_end needs metric_for_best_model, such as 'reward' (the agents' mean) or "
                "'<agent>/reward'; HACPO's evaluation has no loss."
            )

    def _validate_unused_options(self):
        for name, algorithms in OPTIONS_OF.items():
            if self.algorithm not in algorithms and getattr(self, name) != self.default_of(name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with algorithm='{self.algorithm}'. Leave it out; "
                    f"it belongs to {' and '.join(algorithms)}."
                )
        if not self.clip_cross and (self.delta, self.delta_step) != (0.8, 0.025):
            raise ValueError("delta and delta_step have no effect with clip_cross=False. Leave them out.")
        if self.advantage_baseline == "own" and not self.capability_weighting:
            for name, default in (("capability_window", 5), ("capability_metric", "mean_reward")):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name} has no effect with advantage_baseline='own' and capability_weighting=False, which "
                        "use no capability. Leave it out."
                    )
        if self.algorithm == "naive" and self.naive_old_logprobs == "learner" and self.ratio_normalization != "source":
            raise ValueError(
                "ratio_normalization has no effect with naive_old_logprobs='learner', where both sums run over the "
                "learner's tokens. Leave it out."
            )
        if self.num_completions_to_print is not None and not self.log_completions:
            raise ValueError("num_completions_to_print has no effect without log_completions=True.")

    def default_of(self, name: str) -> Any:
        """The default of one of the options."""
        return next(f.default for f in fields(type(self)) if f.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as plain data, for loggers and JSON."""
        agents = [asdict(agent) for agent in self.agents] if self.agents is not None else None
        return {**super().to_dict(), "agents": agents}

    @property
    def shares_rollouts(self) -> bool:
        """Whether agents learn from each other's rollouts."""
        return self.algorithm in ("hacpo", "naive")

    def step_plan(self, num_agents: int) -> StepPlan:
        """The arithmetic of one step for n agents; an error says which numbers would work."""
        processes = self.world_size
        rows_per_prompt = self.num_generations * (num_agents if self.shares_rollouts else 1)
        per_update = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes
        product = (
            f"per_device_train_batch_size {self.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{self.gradient_accumulation_steps} x {processes} processes"
        )
        prompts = self.prompts_per_step
        if prompts is None:
            if per_update % self.num_generations or (per_update // self.num_generations) % processes:
                raise ValueError(
                    f"One update takes {per_update} rollouts ({product}), which are no whole number of prompts of "
                    f"num_generations={self.num_generations} on each process. Make it a multiple of "
                    f"{self.num_generations * processes}, or set prompts_per_step."
                )
            prompts = per_update // self.num_generations
        rows = prompts * rows_per_prompt
        if prompts % processes or rows % per_update:
            working_prompts = [
                b
                for b in range(processes, 2 * prompts + per_update + 1, processes)
                if b * rows_per_prompt % per_update == 0
            ]
            near = sorted(sorted(working_prompts, key=lambda b: abs(b - prompts))[:2])
            work = f"prompts_per_step {' or '.join(map(str, near))}"
            if prompts % processes:
                raise ValueError(
                    f"prompts_per_step={prompts} cannot be dealt to {processes} processes. What would work: {work}."
                )
            unit = self.per_device_train_batch_size * processes
            accumulation = [a for a in range(1, rows // unit + 1) if rows % (a * unit) == 0]
            raise ValueError(
                f"A step gives each agent {rows} rollouts (prompts_per_step {prompts} x {rows_per_prompt} a prompt), "
                f"which do not divide into updates of {per_update} ({product}). What would work: {work}"
                + (f"; or gradient_accumulation_steps {', '.join(map(str, accumulation))}." if accumulation else ".")
            )
        return StepPlan(prompts, rows_per_prompt, per_update, rows // per_update)
