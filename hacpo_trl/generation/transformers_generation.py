"""Samples by transformers' `generate`: without a server, and without a copy of the weights."""

import contextlib
import warnings
from collections.abc import Mapping

import torch
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from ..agent import Agent
from .backend import Completion, GenerationRequest, completion_of


# TRL 1.16 asks a model of transformers 5.24 for this by its old name, at every generation.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)


@contextlib.contextmanager
def _only_explicit_settings(model, generation_config):
    """Hides the model's own generation_config: `generate` would fill every setting we leave at None from it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    original, base.generation_config = base.generation_config, generation_config
    try:
        yield
    finally:
        base.generation_config = original


class TransformersGeneration:
    """Samples with transformers' `generate`, on the very weights that are trained.

    Args:
        agents: The agents, by name.
        engines: For each agent its accelerator and its wrapped policy; called anew for each generation, because
            wrapping happens when training starts.
        gather_deepspeed3_params: See `HACPOConfig.ds3_gather_for_generation`.
    """

    def __init__(self, agents: Mapping[str, Agent], engines, gather_deepspeed3_params: bool):
        self.agents = agents
        self.engines = engines
        self.gather_deepspeed3_params = gather_deepspeed3_params

    def sync_weights(self):
        """Nothing to do: the policies themselves sample."""

    @torch.no_grad()
    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        return {name: self._generate(self.agents[name], request) for name, request in requests.items()}

    def _generate(self, agent: Agent, request: GenerationRequest) -> list[Completion]:
        accelerator, wrapped = self.engines(agent.name)
        device = accelerator.device
        prompts = [torch.tensor(ids) for ids in request.prompt_ids for _ in range(request.num_generations)]
        input_ids = pad(prompts, padding_value=agent.tokenizer.pad_token_id, padding_side="left").to(device)
        attention_mask = pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left").to(
            device
        )

        # The agent's samples come from its own seed stream, and leave the random state of the run untouched.
        devices = [] if device.type == "cpu" else [device]
        with (
            torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type),
            unwrap_model_for_generation(
                wrapped, accelerator, gather_deepspeed3_params=self.gather_deepspeed3_params
            ) as model,
            _only_explicit_settings(model, agent.generation_config),
        ):
            torch.manual_seed(request.seed)
            was_training = model.training
            model.eval()
            output = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=agent.generation_config,
                # Every forward pass gathers weights from all processes, so none may stop before the others. Under
                # ZeRO-3 transformers knows.
                synced_gpus=accelerator.is_fsdp2 or None,
                **({"tokenizer": agent.tokenizer} if agent.stop_strings else {}),
            )
            model.train(was_training)
        completions = output[:, input_ids.shape[1] :].tolist()
        return [completion_of(agent, ids) for ids in completions]
