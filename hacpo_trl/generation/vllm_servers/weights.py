"""What a server is sent: an agent's weights, whole, in buckets; or, of an adapter, its folder.

Gathering weights that are dealt out over the processes is collective: every process must iterate, and iterate to the
end, even if sending has failed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from trl.distributed import DistributedBackend


if TYPE_CHECKING:
    from peft import PeftModel


# As much is gathered, and sent, at once: a share of the memory that the whole model would take.
BUCKET_BYTES = 512 * 2**20


def _buckets(parameters: Iterator[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket, size = [], 0
    for name, parameter in parameters:
        # Under ZeRO-3 a parameter is empty between uses; its size is kept beside it.
        size += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        bucket.append((name, parameter))
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """A gathered parameter as a plain tensor; under FSDP2 this is where it is gathered."""
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weight_buckets(
    accelerator: Accelerator, policy: nn.Module, dtype: torch.dtype
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """An agent's weights under their names in a checkpoint, tied ones once; each bucket is valid until the next.

    Args:
        accelerator: The agent's.
        policy: The agent's policy, unwrapped.
        dtype: The server's: sending more digits than it keeps would only take longer.
    """
    backend = DistributedBackend(accelerator)
    for bucket in _buckets(policy.named_parameters()):
        with backend.gather_params([parameter for _, parameter in bucket]):
            yield [(name, _whole(parameter).to(dtype).contiguous()) for name, parameter in bucket]


def save_adapter(accelerator: Accelerator, policy: "PeftModel", folder: Path):
    """Writes an agent's adapter, and nothing else, where its server can read it."""
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    with DistributedBackend(accelerator).gather_params([parameter for _, parameter in trained]):
        state_dict = {name: _whole(parameter).cpu() for name, parameter in trained}
    if accelerator.is_main_process:
        policy.save_pretrained(folder, state_dict=state_dict, selected_adapters=[policy.active_adapter])
