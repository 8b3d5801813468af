"""Groups over which weights travel from the trainer's main process (rank 0) to a server's workers.

The trainer's side and the server's side of the same group: this module runs in both, and needs nothing but torch (and
vLLM, for NCCL).
"""

import datetime
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class TransferGroup(Protocol):
    """What sends tensors to the workers of one server."""

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        """Sends contiguous tensors; ends in a `RuntimeError` if that takes longer than the group's limit."""
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
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, world_size, limit)

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        """Sends tensors from rank 0, or receives into them on the other ranks."""
        for _, tensor in named:
            # As bytes: gloo does not know every dtype.
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()


class NCCLGroup:
    """A group of vLLM's NCCL engine, as TRL uses it. Tensors are sent in packed buffers.

    NCCL waits without a limit for a peer that is gone, so that the sending is done, and waited for, in a thread.

    Args:
        host: Where rank 0 listens.
        port: Its port.
        world_size: Trainer and workers.
        timeout: Seconds that joining, and each call of `broadcast`, may take.
    """

    def __init__(self, host: str, port: int, world_size: int, timeout: float):
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._timeout = timeout
        self._device = torch.cuda.current_device()
        info = {"master_address": host, "master_port": port, "world_size": world_size}
        self._communicator = self._within_limit(lambda: trainer_init(info))

    def _within_limit(self, work):
        result, failure = [], []

        def run():
            try:
                torch.cuda.set_device(self._device)
                result.append(work())
            except BaseException as error:
                failure.append(error)

        # A daemon: one that hangs for ever must not keep the process from ending.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._timeout)
        if thread.is_alive():
            raise RuntimeError(f"NCCL made no progress within {self._timeout:g} s")
        if failure:
            raise RuntimeError(f"NCCL failed: {failure[0]}") from failure[0]
        return result[0]

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]):
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        def send():
            packed_nccl_broadcast_producer(
                iterator=iter(named), group=self._communicator, src=0, post_iter_func=lambda item: item[1]
            )
            torch.cuda.synchronize()

        # The tensors were gathered on this thread's stream.
        torch.cuda.current_stream().synchronize()
        self._within_limit(send)


def own_address(peer: str) -> str:
    """The address of this machine that `peer` (a host name or address) sees it under."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses a route.
        probe.connect((socket.gethostbyname(peer), 9))
        return probe.getsockname()[0]
