"""DeepSpeed for N policies: one plugin, and so one engine and one configuration, for each agent.

Accelerate holds several DeepSpeed plugins by name and works with the one that is selected. "auto" values of a
configuration are filled in place from a model's sizes, and gradient clipping lives in it, so every agent gets a copy
of its own.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import DeepSpeedPlugin
from torch import nn
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ..config import HACPOConfig


# DeepSpeed 0.19 calls torch 2.13's collectives by their old names, several times a layer.
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)


def plugins_of(base: DeepSpeedPlugin, agents: Iterable[str], args: HACPOConfig) -> dict[str, DeepSpeedPlugin]:
    """A copy of the launch's DeepSpeed configuration for each agent."""
    check_config(base.hf_ds_config.config)
    plugins = {}
    for name in agents:
        plugin = copy.deepcopy(base)
        plugin.hf_ds_config = HfTrainerDeepSpeedConfig(copy.deepcopy(base.hf_ds_config.config))
        plugin.hf_ds_config.trainer_config_process(args)
        plugins[name] = plugin
    return plugins


def check_config(config: Mapping[str, Any]):
    """Refuses DeepSpeed configurations that N policies cannot be trained or saved under."""
    if "optimizer" in config or "scheduler" in config:
        raise ValueError(
            "The DeepSpeed configuration has an 'optimizer' or 'scheduler' section, which all agents would share. "
            "Leave it out: learning_rate, weight_decay, lr_scheduler_type and warmup_steps are set in HACPOConfig, or "
            "for one agent in AgentConfig."
        )
    if config.get("fp16", {}).get("enabled") is True:
        raise ValueError(
            "The DeepSpeed configuration enables fp16, which is not supported: every agent would need a loss scaler "
            "of its own. Use bf16."
        )
    zero = config["zero_optimization"]
    if zero["stage"] == 0:
        raise ValueError(
            "The DeepSpeed configuration has zero_optimization.stage 0, which shards nothing. Use stage 1, 2 or 3, or "
            "DDP (configs/accelerate/multi_gpu.yaml)."
        )
    if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise ValueError(
            "The DeepSpeed configuration leaves stage3_gather_16bit_weights_on_model_save at false, so that no policy "
            "could be saved. Set it to true (in Accelerate's configuration: zero3_save_16bit_model)."
        )


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
