"""Samples by vLLM engines in the training processes themselves, one an agent, on the GPUs that train.

For a single node where servers of their own are not wanted. The engines are TRL's `VLLMGeneration`. All engines of a
process live in its GPU's memory side by side: vLLM's allocator belongs to the process, so that with
`vllm_enable_sleep_mode` they wake and sleep together. Sleeping gives their memory to training, not to each other.
"""

from collections.abc import Callable, Hashable, Mapping

from accelerate import Accelerator
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from ..agent import Agent
from ..config import HACPOConfig
from ..options.vllm import validate_memory
from .backend import Completion, GenerationRequest, completion_of


class VLLMColocateGeneration:
    """A `GenerationBackend`: each process answers its own prompts, one agent after the other.

    Args:
        agents: The agents, by name.
        engines: For each agent its accelerator and its wrapped policy.
        args: The run's settings.
        weights: Called to know which weights the agents have now; equal values mean equal weights.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        engines: Callable[[str], tuple[Accelerator, nn.Module]],
        args: HACPOConfig,
        weights: Callable[[], Hashable],
    ):
        self.agents = agents
        self.engines = engines
        self.args = args
        self.weights = weights
        if not is_vllm_available():
            raise ImportError("vllm_mode='colocate' needs vLLM in this environment: pip install 'hacpo_trl[vllm]'.")
        validate_memory({name: agent.setting("vllm_gpu_memory_utilization") for name, agent in agents.items()})
        for name, agent in agents.items():
            if agent.model_name is None:
                raise ValueError(
                    f"Agent '{name}': vllm_mode='colocate' loads its model from an id or a path, but it was built in "
                    "memory. Give model_name_or_path, or use vllm_mode='server'."
                )
        # Made at the first generation: under DeepSpeed a policy has no engine before training begins.
        self._vllm: dict[str, VLLMGeneration] = {}
        self._loaded: Hashable = None

    def _make(self, agent: Agent) -> VLLMGeneration:
        accelerator, _ = self.engines(agent.name)
        return VLLMGeneration(
            model=agent.policy,
            accelerator=accelerator,
            processing_class=agent.tokenizer,
            mode="colocate",
            tensor_parallel_size=self.args.vllm_tensor_parallel_size,
            gpu_memory_utilization=agent.setting("vllm_gpu_memory_utilization"),
            max_model_length=agent.max_model_length,
            enable_sleep_mode=self.args.vllm_enable_sleep_mode,
            model_impl=self.args.vllm_model_impl,
            trust_remote_code=self.args.trust_remote_code,
            max_completion_length=agent.max_completion_length,
            **agent.vllm_sampling,
        )

    def sync_weights(self):
        """Loads every engine with its agent's weights, unless it has them. Collective."""
        weights = self.weights()
        if weights == self._loaded:
            return
        for name, agent in self.agents.items():
            if name not in self._vllm:
                self._vllm[name] = self._make(agent)
            self.engines(name)
            # Engines that sleep have lost their weights, and load them whenever they wake.
            if not self.args.vllm_enable_sleep_mode:
                self._vllm[name].sync_weights()
        self._loaded = weights

    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        return {name: self._generate(self.agents[name], request) for name, request in requests.items()}

    def _generate(self, agent: Agent, request: GenerationRequest) -> list[Completion]:
        self.engines(agent.name)
        prompts = [list(ids) for ids in request.prompt_ids for _ in range(request.num_generations)]
        _, completions, logprobs, _ = self._vllm[agent.name].generate(prompts, None, request.num_generations)
        return [
            completion_of(agent, ids, [chosen for (chosen, *_) in of_answer])
            for ids, of_answer in zip(completions, logprobs, strict=True)
        ]
