"""A run that is told to stop finishes its update, saves, and says where to continue.

Its signals (`hacpo_trl.signals`) may reach one process or all; after each update the processes agree on whether one of
them was told. A process whose launcher is gone tells itself.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from ..signals import STATUS_AFTER


# Set in what a launcher starts: torch's, Accelerate's, `hacpo train`. Who is started otherwise may outlive its parent.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "HACPO_TRL_LAUNCHED")


class TrainingStopped(SystemExit):
    """Ends the program after a run that was told to stop, with status 0, or 130 after Ctrl-C.

    Attributes:
        signal: The signal's number.
        checkpoint: Where the run can be continued.
    """

    def __init__(self, number: int, checkpoint: str):
        super().__init__(STATUS_AFTER[signal.Signals(number)])
        self.signal, self.checkpoint = number, checkpoint


class StopOnSignals(TrainerCallback):
    """Stops a run after the update in hand, with a checkpoint, when one of its processes is told to.

    Attributes:
        number: The signal that the processes have agreed to stop for; 0 as long as there is none.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.number = 0
        self._told = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED) else None

    def on_train_begin(self, args, state, control, **kwargs):
        self.number = self._told = 0
        try:
            self._handlers = {number: signal.signal(number, self._tell) for number in STATUS_AFTER}
        except ValueError:  # train() was called outside of the main thread, which alone may have handlers
            self._handlers = {}

    def _tell(self, number: int, frame: FrameType | None):
        if self._told:
            # Once more, and nothing is waited for.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._told = number
        name = signal.Signals(number).name
        if self.accelerator.is_main_process:
            # What is printed may be in the middle of a line.
            os.write(2, f"\n{name}: stopping after this update. Once more ends it at once.\n".encode())

    def on_step_end(self, args, state, control, **kwargs):
        if self._parent is not None and os.getppid() != self._parent and not self._told:
            self._told = signal.SIGTERM
        told = torch.tensor(self._told, device=self.accelerator.device)
        self.number = int(self.accelerator.gather(told[None]).max())
        if self.number:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
