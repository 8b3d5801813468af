"""Several policies as the one model, the one optimizer and the one schedule that transformers' `Trainer` knows."""

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn


class PolicyPool(nn.Module):
    """The policies of all agents, as the one model that `Trainer` knows.

    Attributes:
        policies: The models as they load and save.
        wrapped: The same models as they train (DDP and the like), once training has begun. A plain dict: the pool must
            not register their parameters a second time.
    """

    accepts_loss_kwargs = False

    def __init__(self, policies: Mapping[str, nn.Module]):
        super().__init__()
        self.policies = dict(policies)
        for name, policy in self.policies.items():
            # An agent may have the name of one of a module's attributes, such as "type".
            self.add_module(f"policy {name}", policy)
        self.wrapped: dict[str, Any] = {}

    def forward(self, *args, **kwargs):
        raise RuntimeError("A PolicyPool has no forward pass: call one agent's policy.")

    def train(self, mode: bool = True):
        for model in self.wrapped.values():
            model.train(mode)
        return super().train(mode)

    @contextlib.contextmanager
    def no_sync(self):
        """Accelerate finds this under `Accelerator.no_sync`: no policy reduces gradients within an accumulation."""
        with contextlib.ExitStack() as stack:
            for model in self.wrapped.values():
                if hasattr(model, "no_sync"):
                    stack.enter_context(model.no_sync())
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool):
        """The same under FSDP2, which Accelerate addresses by this name."""
        for model in self.wrapped.values():
            model.set_requires_gradient_sync(requires_gradient_sync)

    def gradient_checkpointing_enable(self, **kwargs):
        for policy in self.policies.values():
            policy.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs):
        for policy in self.policies.values():
            policy.activation_checkpointing_enable(**kwargs)


class PolicyOptimizers:
    """What the training loop sees as its optimizer: all agents' optimizers, stepped together."""

    def __init__(self, optimizers: Mapping[str, Any]):
        self.optimizers = dict(optimizers)

    def step(self):
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(*args, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


class PolicySchedulers:
    """What the training loop sees as its learning-rate scheduler."""

    def __init__(self, schedulers: Mapping[str, Any]):
        self.schedulers = dict(schedulers)

    def step(self):
        for scheduler in self.schedulers.values():
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        return [scheduler.get_last_lr()[0] for scheduler in self.schedulers.values()]
