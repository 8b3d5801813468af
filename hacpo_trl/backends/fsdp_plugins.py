"""FSDP2 for N policies: one plugin for each agent, so that each is cut at its own layers.

Accelerate keeps one FSDP plugin for all accelerators and notes in it the layer classes of the first model that it
wraps; a model of another family has no such layers. So every agent gets a copy of the launch's plugin, which is put in
place while the agent's policy is wrapped.
"""

import copy

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from transformers import PreTrainedModel


def plugin_of(
    base: FullyShardedDataParallelPlugin, name: str, policy: PreTrainedModel
) -> FullyShardedDataParallelPlugin:
    """The launch's FSDP settings for one agent.

    Args:
        base: The launch's plugin.
        name: The agent's name.
        policy: Its policy. Of the classes in `fsdp_transformer_layer_cls_to_wrap`, which names those of all agents,
            the agent's plugin keeps the policy's.
    """
    plugin = copy.deepcopy(base)
    if isinstance(policy, FSDPModule):
        # A further train(): the policy is cut and checkpointed already, and its layers' classes have other names.
        plugin.auto_wrap_policy, plugin.activation_checkpointing = None, False
        return plugin
    if classes := plugin.transformer_cls_names_to_wrap:
        own = [cls for cls in classes if get_module_class_from_name(policy, cls) is not None]
        if not own:
            raise ValueError(
                f"Agent '{name}': its policy has none of the layers in fsdp_transformer_layer_cls_to_wrap="
                f"{','.join(classes)}. Add its own ({', '.join(policy._no_split_modules or ())}), or leave the "
                "setting out: the layers of each policy are known."
            )
        plugin.transformer_cls_names_to_wrap = own
    if plugin.mixed_precision_policy is not None:
        # Accelerate would also round what a policy returns, log-probabilities, to 8 bits: sequence ratios are clipped
        # at a distance of 3e-4 from 1. Gradients are summed in float32, as under DDP.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype, reduce_dtype=torch.float32
        )
    return plugin


def reshard(policy: nn.Module):
    """Drops weights that a forward pass has gathered: an optimizer must be given the shards."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_generate_gather(policy: nn.Module):
    """Lets `generate`, too, gather the weights that belong to no layer, which an adapter's `generate` goes past."""
    register_fsdp_forward_method(policy, "generate")


def prepare_reference(accelerator: Accelerator, reference: nn.Module) -> nn.Module:
    """Shards a frozen policy as the trained one is sharded; `prepare` would want an optimizer with it."""
    return fsdp2_prepare_model(accelerator, reference).eval()
