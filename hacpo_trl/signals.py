"""The signals that have a run stop, and what its program then ends with."""

import signal


# SIGUSR1 is what Slurm sends ahead of time with `--signal`.
STATUS_AFTER = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGUSR1: 0}
