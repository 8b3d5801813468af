"""From names to agents: models, adapters and tokenizers are loaded here, and what could not be trained is refused."""

import contextlib
import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file
from trl.trainer.utils import create_model_from_path

from .agent import REFERENCE_ADAPTER, Agent, merged
from .config import AgentConfig, HACPOConfig
from .options.agent import parse_agents


logger = logging.getLogger(__name__)

# bfloat16 has 8 bits of mantissa: an update below half of the last one, 2^-9 of a weight's size, is rounded away.
BFLOAT16_STEP = 2.0**-9
# Of so many weights of each tensor the share that can move is measured.
SAMPLED_WEIGHTS = 10_000


# ---- loading --------------------------------------------------------------------------------------------------------
def load_model(config: AgentConfig, args: HACPOConfig) -> nn.Module:
    """Loads one agent's model by its id or path, in float32 unless `model_init_kwargs` asks for another dtype.

    A folder that holds an adapter gives its base model with the adapter, to be trained further.
    """
    path = config.model_name_or_path
    if path is None:
        raise ValueError(
            f"Agent '{config.name}' has no model: give model_name_or_path, or pass the model to the trainer."
        )
    kwargs = _model_kwargs(config, args)
    if args.world_size > 1:
        # Each process holds the model on its own device; "auto" would spread it over the devices of all of them.
        kwargs["device_map"] = None
    where = {"revision": kwargs.get("revision"), "token": kwargs.get("token")}
    with _named(config.name, "model", path):
        if find_adapter_config_file(path, **where) is None:
            return _load_whole(path, kwargs, config.name)
        from peft import PeftConfig, PeftModel

        base = PeftConfig.from_pretrained(path, **where).base_model_name_or_path
    with _named(config.name, "the base model of its adapter", base):
        # The revision is the adapter's.
        policy = _load_whole(base, {k: v for k, v in kwargs.items() if k != "revision"}, config.name)
    with _named(config.name, "adapter", path):
        return PeftModel.from_pretrained(policy, path, is_trainable=True, revision=where["revision"])


def _model_kwargs(config: AgentConfig, args: HACPOConfig) -> dict[str, Any]:
    kwargs = merged(args.model_init_kwargs, config.model_init_kwargs)
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    return kwargs


def _load_whole(path: str, kwargs: dict[str, Any], name: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(
        path, **{key: kwargs[key] for key in ("revision", "token", "trust_remote_code") if key in kwargs}
    )
    _check_is_decoder(name, config)
    if not config.architectures and not getattr(config, "auto_map", None):
        raise ValueError(
            f"Agent '{name}': its model's config names no architectures, so it cannot be told what it is. Add them to "
            'its config.json, such as ["LlamaForCausalLM"], or pass the loaded model.'
        )
    # Told apart here, by the revision that is asked for: left to itself, TRL reads it off the main one.
    architecture = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
    return create_model_from_path(path, architecture, **kwargs)


def load_tokenizer(config: AgentConfig, args: HACPOConfig, model: Any) -> PreTrainedTokenizerBase:
    """Loads one agent's tokenizer from where its model came from, unless `tokenizer_name_or_path` says otherwise."""
    own = config.tokenizer_name_or_path
    model_path = config.model_name_or_path or model.config._name_or_path
    path = own or model_path
    if not path:
        raise ValueError(
            f"Agent '{config.name}': its model was built in memory, so no tokenizer can be loaded beside it. Pass "
            "one in processing_classes, or set tokenizer_name_or_path."
        )
    # The revision is the model's. Another repository has revisions of its own.
    revision = _model_kwargs(config, args).get("revision", "main") if path == model_path else "main"
    with _named(config.name, "tokenizer", path, "Set tokenizer_name_or_path, or pass one in processing_classes."):
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=args.trust_remote_code)


class _named:
    """Says of an error of loading whose it is, of what, and what to do."""

    def __init__(self, agent: str, what: str, path: str, otherwise: str = ""):
        self.agent, self.what, self.path, self.otherwise = agent, what, path, otherwise

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, (OSError, ValueError, KeyError)) or str(error).startswith("Agent '"):
            return
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        looks_local = self.path.startswith((".", "/", "~")) or self.path.count("/") > 1
        if Path(self.path).is_dir():
            advice = "The folder is there, so something in it is missing or broken."
        elif looks_local:
            advice = "There is no such folder here."
        elif constants.HF_HUB_OFFLINE:
            advice = "It is not in the cache, and HF_HUB_OFFLINE keeps it from being fetched."
        else:
            advice = "Is the id right, may you read it (`hf auth login`), and can this machine reach the Hub?"
        raise ValueError(
            f"Agent '{self.agent}': its {self.what} {self.path!r} could not be loaded. {advice} {self.otherwise}"
            f"{' ' if self.otherwise else ''}({first_line})"
        ) from error


# ---- what can be trained --------------------------------------------------------------------------------------------
def _check_is_decoder(name: str, config: Any):
    if config.is_encoder_decoder:
        raise ValueError(
            f"Agent '{name}': {config.model_type} is an encoder with a decoder. Agents are decoder-only language "
            "models."
        )


def _base_of(policy: Any) -> Any:
    """The model without its adapter."""
    return policy.get_base_model() if hasattr(policy, "peft_config") else policy


def _check_is_language_model(name: str, policy: Any):
    base = _base_of(policy)
    if isinstance(base, PreTrainedModel):
        _check_is_decoder(name, base.config)
    if not isinstance(base, PreTrainedModel) or not base.can_generate():
        raise ValueError(
            f"Agent '{name}': its model is a {type(base).__name__}, which generates no text. Agents are decoder-only "
            "language models, such as Qwen3ForCausalLM."
        )


def check_trainable(name: str, policy: Any, tokenizer: PreTrainedTokenizerBase, learning_rate: float):
    """Refuses a policy that could not be trained, or would not learn what it should; warns of what learns badly.

    Args:
        name: The agent.
        policy: Its policy, a PEFT model or whole.
        tokenizer: Its tokenizer.
        learning_rate: Its learning rate.
    """
    base = _base_of(policy)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not trained:
        hint = "Load it with is_trainable=True." if policy is not base else "Let some of its parameters require grad."
        raise ValueError(f"Agent '{name}': none of its parameters can be trained. {hint}")
    quantized = getattr(base, "is_quantized", False)
    if quantized and policy is base:
        raise ValueError(
            f"Agent '{name}': its weights are quantized, and cannot be trained in full. Give it a peft_config."
        )
    if any(parameter.dtype == torch.float16 for parameter in trained):
        raise ValueError(
            f"Agent '{name}': its weights are float16, whose updates overflow and vanish. Load it in float32 "
            "(model_init_kwargs: {dtype: float32}) and let bf16=True compute in bfloat16."
        )
    in_bfloat16 = [parameter for parameter in trained if parameter.dtype == torch.bfloat16]
    if in_bfloat16:
        logger.warning(
            f"Agent '{name}': {len(in_bfloat16)} of its {len(trained)} trained tensors are bfloat16, in which an "
            f"update below 1/512 of a weight is rounded away. At learning_rate={learning_rate:g} about "
            f"{share_that_moves(in_bfloat16, learning_rate):.1%} of their weights can move. Load it in float32 "
            "(model_init_kwargs: {dtype: float32}) and let bf16=True compute in bfloat16."
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"Agent '{name}': its tokenizer has no tokens but special ones, so its files are missing. Set "
            "tokenizer_name_or_path, or pass one in processing_classes."
        )
    size = base.get_input_embeddings().num_embeddings
    if (largest := max(tokenizer.get_vocab().values())) >= size:
        raise ValueError(
            f"Agent '{name}': its tokenizer has the id {largest}, but its model's embedding only {size} rows. Give it "
            "the tokenizer that the model was trained with, or resize the embedding."
        )


def share_that_moves(parameters: Iterable[nn.Parameter], learning_rate: float) -> float:
    """Of bfloat16 weights the share that an update of AdamW, about as large as the learning rate, does not leave as
    they are."""
    moving, total = 0, 0
    for parameter in parameters:
        weights = parameter.detach().flatten()
        weights = weights[:: max(1, weights.numel() // SAMPLED_WEIGHTS)].float().abs()
        moving, total = moving + int((weights * BFLOAT16_STEP < learning_rate).sum()), total + weights.numel()
    return moving / max(total, 1)


def warn_of_dropout(agent: Agent):
    """Says what dropout costs an agent that trains with it."""
    rates = {module.p for module in agent.policy.modules() if isinstance(module, nn.Dropout) and module.p > 0}
    if rates:
        logger.warning(
            f"Agent '{agent.name}': dropout of {max(rates):g} stays on (disable_dropout=False). Old log-probabilities "
            "are those of the whole policy, new ones those of a thinned-out one: own ratios leave the clip range "
            "before any update, and most rollouts are clipped. Watch own_ratio and clip_ratio."
        )


# ---- agents ---------------------------------------------------------------------------------------------------------
def build_agents(
    models: Mapping[str, str | PreTrainedModel] | None,
    args: HACPOConfig,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    peft_configs: Mapping[str, Any],
) -> dict[str, Agent]:
    """Makes the agents of a run from what the trainer was given; models and tokenizers are loaded where they were not
    given."""
    if models is None and args.agents is None:
        raise ValueError("There are no agents: give models, a dict of name to model, or args.agents.")
    for argument, given in (("models", models), ("processing_classes", tokenizers), ("peft_configs", peft_configs)):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"{argument} must be a mapping with an entry for each agent, such as {{'qwen': ...}}, not a "
                f"{type(given).__name__}."
            )
    named = args.agent_configs or parse_agents([{"name": name} for name in models or ()]) or []
    configs = {config.name: config for config in named}
    if models is not None and set(models) != set(configs):
        raise ValueError(
            f"models has the agents {sorted(models)}, but args.agents {sorted(configs)}. They must match."
        )
    for argument, given in (("processing_classes", tokenizers), ("peft_configs", peft_configs)):
        if unknown := sorted(set(given) - set(configs)):
            raise ValueError(f"{argument} names {unknown}, but the agents are {sorted(configs)}.")

    agents = {}
    for name, config in configs.items():
        model = None if models is None else models[name]
        if model is None or isinstance(model, (str, Path)):
            config = replace(config, model_name_or_path=str(model) if model else config.model_name_or_path)
            model = load_model(config, args)
        elif not isinstance(model, nn.Module):
            raise TypeError(
                f"Agent '{name}': its model must be an id, a path or a loaded model, not a {type(model).__name__}."
            )
        _check_is_language_model(name, model)
        tokenizer = tokenizers[name] if name in tokenizers else load_tokenizer(config, args, model)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"Agent '{name}': its tokenizer must be transformers', not a {type(tokenizer).__name__}.")
        model = _with_adapter(name, model, peft_configs.get(name), config.peft_config)
        agents[name] = Agent(config, args, model, tokenizer)
    if len({id(agent.policy) for agent in agents.values()}) < len(agents):
        raise ValueError("Two agents share one model object. Give each its own: they are trained apart.")
    for name, agent in agents.items():
        check_trainable(name, agent.policy, agent.tokenizer, agent.setting("learning_rate"))
    return agents


def _with_adapter(name: str, model: nn.Module, given: Any, configured: Mapping[str, Any] | None) -> nn.Module:
    """The model with a new adapter, if its agent is to train one."""
    if given is not None and configured is not None:
        raise ValueError(f"Agent '{name}': a PEFT configuration in both peft_configs and args.agents. Give one.")
    if given is None and configured is None:
        return model
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"Agent '{name}': its model has an adapter already, and a PEFT configuration asks for another. Leave the "
            "configuration out to train the adapter further, or give the base model."
        )
    from peft import get_peft_config, get_peft_model

    if configured is not None:
        given = get_peft_config({"peft_type": "LORA", "task_type": "CAUSAL_LM", **configured})
    return get_peft_model(model, given)


# ---- what the KL term measures the distance to ----------------------------------------------------------------------
def initial_policies(agents: Mapping[str, Agent], args: HACPOConfig) -> dict[str, nn.Module]:
    """What the KL term measures the distance to, before training or resuming moves the policies.

    Of whole policies frozen copies are returned. An adapter needs none: one that begins at its base model is switched
    off, and one that was trained before gets a frozen copy of itself beside it, in the same model.
    """
    if args.beta == 0:
        return {}
    copies = {}
    for name, agent in agents.items():
        if agent.is_adapter:
            keep_adapter_as_it_came(agent.policy)
        else:
            copies[name] = _copy_of(agent, args).requires_grad_(False)
    return copies


def keep_adapter_as_it_came(policy: Any):
    """Adds a frozen copy of a trained adapter as a second one, as TRL does; nothing if the adapter changes nothing."""
    active = policy.active_adapter
    trained = {name: parameter for name, parameter in policy.named_parameters() if f".{active}." in name}
    # LoRA begins with B = 0. Other kinds begin otherwise: a copy of a fresh one does no harm.
    up = [parameter for name, parameter in trained.items() if "lora_B" in name or "lora_embedding_B" in name]
    with _whole(up):
        if up and not any(bool(parameter.detach().any()) for parameter in up):
            return
    policy.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(policy.peft_config[active]))
    for name, parameter in trained.items():
        reference = policy.get_parameter(name.replace(f".{active}.", f".{REFERENCE_ADAPTER}."))
        with _whole([parameter, reference]):
            reference.data.copy_(parameter.data)
    policy.set_adapter(active)


def _whole(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager:
    """Within it parameters that ZeRO-3 has dealt out are whole, and what is written into them stays."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def _copy_of(agent: Agent, args: HACPOConfig) -> nn.Module:
    if any(hasattr(parameter, "ds_id") for parameter in agent.policy.parameters()):
        # ZeRO-3 has dealt the weights out already; a copy of a share is no model.
        return load_model(agent.config, args)
    return copy.deepcopy(agent.policy)
