"""What a run shows on the terminal: a progress bar, and a table of rewards that grows with every log."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback


def _share(logs: dict, agent: str) -> float | None:
    """Share of the peers' rollouts that clipping discarded."""
    below, above = (logs.get(f"{agent}/clip_ratio/cross_{side}") for side in ("below", "above"))
    return None if below is None or above is None else below + above


class RewardTableCallback(TrainerCallback):
    """Prints a row for each log: update, reward and answer length of each agent, discarded peers' rollouts, seconds a
    step.

    It stands in for transformers' progress bar, which would print the hundred metrics of a run as one line. All of
    them still go to `report_to` and to `trainer.state.log_history`. `disable_tqdm=True` leaves the bar out.

    Args:
        agents: The agents' names.
        console: Where to print.
    """

    def __init__(self, agents: Sequence[str], console: Console | None = None):
        self.agents = list(agents)
        self.console = console or Console()
        self.progress: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self._print_header()
        if not args.disable_tqdm and self.console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("updates"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.task = self.progress.add_task("training", total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def _columns(self) -> list[tuple[str, int]]:
        columns = [("update", 7)]
        for agent in self.agents:
            width = max(len(agent), 6)
            columns += [(f"{agent} reward", width + 7), ("length", 7)]
            if len(self.agents) > 1:
                columns.append(("discarded", 10))
        return [*columns, ("s/step", 7)]

    def _print_header(self):
        line = "  ".join(f"{title:>{width}}" for title, width in self._columns())
        self.console.print(line, style="bold", highlight=False, soft_wrap=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # Evaluations have no grad_norm; and a log between the updates of one step has no new rewards to show.
        wanted = {f"{self.agents[0]}/grad_norm", f"{self.agents[0]}/completions/mean_length"}
        if not state.is_world_process_zero or not wanted <= (logs or {}).keys():
            return
        values: list[str] = [str(state.global_step)]
        for agent in self.agents:
            values.append(_number(logs.get(f"{agent}/reward"), "{:.3f}"))
            values.append(_number(logs.get(f"{agent}/completions/mean_length"), "{:.1f}"))
            if len(self.agents) > 1:
                values.append(_number(_share(logs, agent), "{:.0%}"))
        values.append(_number(logs.get("time/step"), "{:.2f}"))
        widths = [width for _, width in self._columns()]
        line = "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        self.console.print(line, highlight=False, soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
