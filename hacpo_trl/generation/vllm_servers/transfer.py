"""Groups over which weights travel from the trainer's main process (rank 0) to a server's workers.

The trainer's side and the server's side of the same group: this module runs in both, and needs nothing but torch (and
vLLM, for NCCL).
"""

import datetime
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class TransferGroup(Protocol):
    """What sends tensors to the workers of one server."""

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        """Sends contiguous tensors, and returns when they are sent."""
        ...

    def close(self):
        """Lets go of what a new group needs, such as a port."""
        ...


class GlooGroup:
    """A group over gloo, apart from the process group that trains.

    Args:
        host: Where rank 0's store listens.
        port: Its port.
        name: Name of the group within the store.
        rank: 0 on the trainer, the workers from 1.
        world_size: Trainer and workers.
        timeout: Seconds that joining, and each tensor, may take.
        store: The store to use; only rank 0 has one already.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        rank: int,
        world_size: int,
        timeout: float,
        store: dist.TCPStore | None = None,
    ):
        limit = datetime.timedelta(seconds=timeout)
        self._store = store if store is not None else dist.TCPStore(host, port, is_master=False, timeout=limit)
        # torch says nothing of what it can do.
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, world_size, limit)

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        """Sends tensors from rank 0, or receives into them on the other ranks."""
        for _, tensor in named:
            # As bytes: gloo does not know every dtype.
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()

    def close(self):
        """Nothing: the store is shared, and a new group takes another name in it."""


class NCCLGroup:
    """A group of vLLM's NCCL engine, as TRL's client uses it. Tensors are sent in packed buffers.

    NCCL waits without a limit for a peer that is gone: both joining and sending are to be done in a thread that may be
    given up.

    Args:
        host: Where rank 0 listens.
        port: Its port.
        world_size: Trainer and workers.
        device: Index of the GPU that the tensors are on; a thread has a current device of its own.
    """

    def __init__(self, host: str, port: int, world_size: int, device: int):
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._device = device
        torch.cuda.set_device(device)
        self._communicator = trainer_init({"master_address": host, "master_port": port, "world_size": world_size})

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self._device)
        packed_nccl_broadcast_producer(
            iterator=iter(named), group=self._communicator, src=0, post_iter_func=lambda item: item[1]
        )
        # Sent when this returns, and not only enqueued: the tensors are reused.
        torch.cuda.synchronize()

    def close(self):
        """Frees the port."""
        self._communicator.group.store = None
        self._communicator.group.socket = None


def own_address(peer: str) -> str:
    """The address of this machine that `peer` (a host name or address) sees it under."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses a route.
        probe.connect((socket.gethostbyname(peer), 9))
        return probe.getsockname()[0]
