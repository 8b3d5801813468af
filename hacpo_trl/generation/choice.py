"""Which backend a run samples with."""

from collections.abc import Callable, Hashable, Mapping

from accelerate import Accelerator
from torch import nn

from ..agent import Agent
from ..config import HACPOConfig
from .backend import GenerationBackend
from .transformers_generation import TransformersGeneration


def generation_backend(
    agents: Mapping[str, Agent],
    engines: Callable[[str], tuple[Accelerator, nn.Module]],
    args: HACPOConfig,
    weights: Callable[[], Hashable],
) -> GenerationBackend:
    """The backend that `use_vllm` and `vllm_mode` ask for.

    Args:
        agents: The agents, by name.
        engines: For each agent its accelerator and its wrapped policy, as they are when it is called.
        args: The run's settings.
        weights: Called to know which weights the agents have now; equal values mean equal weights.
    """
    if not args.use_vllm:
        return TransformersGeneration(agents, engines, args.ds3_gather_for_generation)
    # Imported here: where vLLM is installed, what both have of TRL imports it.
    if args.vllm_mode == "server":
        from .vllm_servers.generation import VLLMServerGeneration

        return VLLMServerGeneration(agents, engines, args, weights)
    from .vllm_colocate import VLLMColocateGeneration

    return VLLMColocateGeneration(agents, engines, args, weights)
