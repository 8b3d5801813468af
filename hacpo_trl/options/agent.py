"""`AgentConfig`: what is one agent's own."""

import json
import re
from dataclasses import dataclass, fields
from typing import Any

from .kinds import convert_fields
from .names import unknown_name


# Agents' names are folder names (checkpoint-10/qwen), module names and metric prefixes (qwen/reward).
AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Folders and prefixes that a run has for other things, without regard to case: some file systems have none.
RESERVED_NAMES = re.compile(
    r"checkpoint-\d+|completions|non_finite|runs|vllm_adapters|wandb|trackio|eval|train|test", re.IGNORECASE
)


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
        vllm_server_devices: Devices that `hacpo serve` starts this agent's server on: GPUs, or CPU cores
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
        if RESERVED_NAMES.fullmatch(self.name):
            raise ValueError(
                f"Agent name {self.name!r} is taken: a run has a folder or metrics of that name. Choose another."
            )
        convert_fields(self, f"Agent '{self.name}': ")
        if {"api_key", "api-key"} & (self.vllm_server_args or {}).keys():
            raise ValueError(
                f"Agent '{self.name}': an api_key in vllm_server_args would be in files and lists of processes. Set "
                "VLLM_API_KEY in the environment of server and training instead."
            )

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
                raise ValueError(f"Agent '{mapping['name']}': {unknown_name(key, known, 'key')}")
        return cls(**mapping)


def parse_agents(agents: Any) -> list[AgentConfig] | None:
    """Agents as a recipe or the command line gives them: a list of `AgentConfig` or of mappings, or JSON text."""
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
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError(f"Two agents share a name: {names}. Names must differ, also without regard to case.")
    return agents
