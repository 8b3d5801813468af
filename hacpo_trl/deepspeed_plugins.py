"""DeepSpeed for N policies: one plugin, and so one engine and one configuration, for each agent.

Accelerate holds several DeepSpeed plugins by name and works with the one that is selected. "auto" values of a
configuration are filled in place from a model's sizes, and gradient clipping lives in it, so every agent gets a copy
of its own.
"""

import copy
import warnings
from collections.abc import Iterable

from accelerate.utils import DeepSpeedPlugin
from torch import nn
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from .config import HACPOConfig


# DeepSpeed 0.19 calls torch 2.13's collectives by their old names, several times a layer.
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)


def plugins_of(base: DeepSpeedPlugin, agents: Iterable[str], args: HACPOConfig) -> dict[str, DeepSpeedPlugin]:
    """A copy of the launch's DeepSpeed configuration for each agent."""
    if "optimizer" in base.hf_ds_config.config or "scheduler" in base.hf_ds_config.config:
        raise ValueError(
            "The DeepSpeed configuration has an 'optimizer' or 'scheduler' section, which all agents would share. "
            "Leave it out: learning_rate, weight_decay, lr_scheduler_type and warmup_steps are set in HACPOConfig, or "
            "for one agent in AgentConfig."
        )
    plugins = {}
    for name in agents:
        plugin = copy.deepcopy(base)
        plugin.hf_ds_config = HfTrainerDeepSpeedConfig(copy.deepcopy(base.hf_ds_config.config))
        plugin.hf_ds_config.trainer_config_process(args)
        plugins[name] = plugin
    return plugins


def finalize_plugin(
    plugin: DeepSpeedPlugin, args: HACPOConfig, policy: nn.Module, max_steps: int, max_grad_norm: float
):
    """Fills what only the policy and the length of training tell, just before the policy is prepared.

    Args:
        plugin: The agent's plugin.
        args: The run's settings.
        policy: The agent's policy.
        max_steps: Optimizer updates of the run.
        max_grad_norm: The agent's gradient clipping; 0 clips nothing.
    """
    plugin.hf_ds_config.trainer_config_finalize(args, policy, max_steps)
    plugin.deepspeed_config = plugin.hf_ds_config.config
    plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
    # The optimizer is torch's own, built like everywhere else; DeepSpeed only wants to be told that this is meant.
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
