"""Checks of the options for vLLM, before anything is started."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlparse


# The ports at which servers join to receive weights, unless an agent has its own: TRL's, and those that follow.
FIRST_GROUP_PORT = 51216

# Of HACPOConfig and AgentConfig what only one vllm_mode reads.
VLLM_OPTIONS = ("old_logprobs", "vllm_importance_sampling_correction", "vllm_mode")
SERVER_LIMITS = ("vllm_server_timeout", "vllm_generation_timeout", "vllm_sync_timeout")
SERVER_OPTIONS = (*SERVER_LIMITS, "vllm_group_host")
COLOCATE_OPTIONS = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "vllm_model_impl",
)
CORRECTION_OPTIONS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
AGENT_SERVER_OPTIONS = (
    "vllm_server_base_url",
    "vllm_group_port",
    "vllm_server_timeout",
    "vllm_server_devices",
    "vllm_server_args",
)
AGENT_COLOCATE_OPTIONS = ("vllm_gpu_memory_utilization",)


def _refuse(args: Any, names: Iterable[str], agent_names: Iterable[str], where: str):
    """Refuses options that would have no effect."""
    for name in names:
        if getattr(args, name) != args.default_of(name):
            raise ValueError(f"{name}={getattr(args, name)!r} has no effect {where}. Leave it out.")
    for agent in args.agent_configs:
        for name in agent_names:
            if getattr(agent, name) is not None:
                raise ValueError(
                    f"Agent '{agent.name}': {name}={getattr(agent, name)!r} has no effect {where}. Leave it out."
                )


def validate_vllm(args: Any):
    """Refuses what cannot work, and what would be without effect; fills in the ports that agents leave open.

    Args:
        args: A `HACPOConfig`.
    """
    if not args.use_vllm:
        options = (*VLLM_OPTIONS, *SERVER_OPTIONS, *COLOCATE_OPTIONS, *CORRECTION_OPTIONS)
        _refuse(args, options, (*AGENT_SERVER_OPTIONS, *AGENT_COLOCATE_OPTIONS), "without use_vllm=True")
        return
    if args.vllm_mode == "server":
        _refuse(args, COLOCATE_OPTIONS, AGENT_COLOCATE_OPTIONS, "with vllm_mode='server'")
        _validate_servers(args)
    else:
        _refuse(args, SERVER_OPTIONS, AGENT_SERVER_OPTIONS, "with vllm_mode='colocate'")
    if args.old_logprobs == "sampler":
        _validate_sampler_logprobs(args)
    if not args.vllm_importance_sampling_correction:
        _refuse(args, CORRECTION_OPTIONS, (), "without vllm_importance_sampling_correction=True")
        return
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if low is None and high is None:
        raise ValueError(
            "vllm_importance_sampling_correction needs a bound: vllm_importance_sampling_clip_max (TRL's is 3.0) or "
            "vllm_importance_sampling_clip_min."
        )
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
        )


def _validate_servers(args: Any):
    for name in SERVER_LIMITS:
        if getattr(args, name) <= 0:
            raise ValueError(f"{name} must be above 0 seconds, not {getattr(args, name)}.")
    if args.agents is None:
        raise ValueError("vllm_mode='server' needs args.agents, each with the vllm_server_base_url of its server.")
    ports: dict[int, str] = {}
    addresses: dict[str, str] = {}
    for index, agent in enumerate(args.agents):
        url = agent.vllm_server_base_url
        parsed = urlparse(url or "")
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise ValueError(
                f"Agent '{agent.name}': vllm_mode='server' needs its vllm_server_base_url, such as "
                f"'http://localhost:{8000 + index}', not {url!r}."
            )
        host = "localhost" if parsed.hostname in ("127.0.0.1", "0.0.0.0", "::1") else parsed.hostname
        address = f"{host}:{parsed.port or {'http': 80, 'https': 443}[parsed.scheme]}"
        if address in addresses:
            raise ValueError(
                f"Agents '{addresses[address]}' and '{agent.name}' share the vLLM server {url}. Each agent needs "
                "a server of its own."
            )
        addresses[address] = agent.name
        if agent.vllm_group_port is None:
            agent.vllm_group_port = FIRST_GROUP_PORT + index
        if agent.vllm_group_port in ports:
            raise ValueError(
                f"Agents '{ports[agent.vllm_group_port]}' and '{agent.name}' share "
                f"vllm_group_port={agent.vllm_group_port}. Each agent needs a port of its own."
            )
        ports[agent.vllm_group_port] = agent.name


def validate_memory(shares: Mapping[str, float]):
    """Colocated engines share a GPU, whether they sleep between generations or not: they wake together.

    Args:
        shares: For each agent the share of a GPU's memory that its engine takes.
    """
    for name, share in shares.items():
        if not 0 < share < 1:
            raise ValueError(
                f"Agent '{name}': vllm_gpu_memory_utilization must be a share between 0 and 1, not {share:g}."
            )
    if sum(shares.values()) >= 1:
        wanted = ", ".join(f"{name}: {share:g}" for name, share in shares.items())
        raise ValueError(
            f"The colocated engines want {sum(shares.values()):g} of each GPU's memory ({wanted}). Together they must "
            "take less than 1: lower vllm_gpu_memory_utilization, or use vllm_mode='server'."
        )


def _validate_sampler_logprobs(args: Any):
    if args.vllm_importance_sampling_correction:
        raise ValueError(
            "vllm_importance_sampling_correction compares the sampler's log-probabilities with recomputed ones; with "
            "old_logprobs='sampler' there are none. Leave one of them out."
        )
    whole = {"top_p": 1.0, "top_k": 0, "min_p": (None, 0.0), "repetition_penalty": 1.0}
    for name, neutral in whole.items():
        values = {"": getattr(args, name), **{a.name: getattr(a, name) for a in args.agent_configs}}
        for agent, value in values.items():
            allowed = neutral if isinstance(neutral, tuple) else (neutral,)
            if value is not None and value not in allowed:
                whose = f"Agent '{agent}': " if agent else ""
                raise ValueError(
                    f"{whose}{name}={value!r} makes vLLM's log-probabilities those of a cut distribution, which the "
                    "trainer's cannot be compared with. Leave it out, or use old_logprobs='recompute'."
                )
