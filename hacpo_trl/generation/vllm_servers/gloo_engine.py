"""The server's side of the weight transfer over gloo: an engine for vLLM on a CPU, where there is no NCCL.

It runs inside vLLM's workers, named by `--weight-transfer-config '{"backend": "hacpo_gloo"}'`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from .transfer import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How the workers join the trainer's group; the trainer is rank 0.

    Attributes:
        master_address: Where the trainer's store listens.
        master_port: Its port.
        name: Name of the group in the store, a new one for each connection.
        rank_offset: Rank of the first worker.
        world_size: Trainer and workers.
        timeout: Seconds that joining, and each tensor, may take.
    """

    master_address: str
    master_port: int
    name: str
    rank_offset: int
    world_size: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that follow, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives tensors by gloo broadcasts and loads them as vLLM loads a checkpoint."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo):
        self.group = GlooGroup(
            init_info.master_address,
            init_info.master_port,
            init_info.name,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            init_info.timeout,
        )

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict):
        # The base class synchronizes an accelerator afterwards; gloo has none to wait for.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo):
        self.model.load_weights(self._received(update_info))

    def _received(self, update_info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([(name, tensor)])
            yield name, tensor

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            # On a CPU the head multiplies by a packed copy of its weight. When it is tied to the embedding, loading
            # the embedding leaves that copy as it was.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self):
        self.group = None
