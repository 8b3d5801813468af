"""What a report shows: panels, each with a subplot for each agent and a curve for each group of runs.

A curve is the mean over its group's runs. Around it is a band: Student's 95 % interval over runs (seeds) where there
are several, or, for ratios and lengths of a single run, from the smallest to the largest value that was logged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..algorithm.objective import cross_lower_bound
from .runs import Group
from .statistics import t_interval


@dataclass(frozen=True)
class Curve:
    """Points to draw: `x`, `y`, and a band from `low` to `high`, `(P,)` each, or without a band.

    Attributes:
        label: Group, and metric where a subplot has several.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Subplot:
    """The curves of one agent, and horizontal lines with their names."""

    title: str
    curves: Sequence[Curve]
    lines: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Panel:
    """A picture.

    Attributes:
        name: Name of its file.
        title: Its heading.
        text: A sentence on how to read it.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        subplots: One for each agent, or one for all.
    """

    name: str
    title: str
    text: str
    x_label: str
    y_label: str
    subplots: Sequence[Subplot]


def _curve(
    group: Group, key: str, label: str, spread: str | None = None, missing: float | None = None
) -> Curve | None:
    """The curve of one metric.

    Args:
        group: The group of runs.
        key: The metric.
        label: The curve's name.
        spread: Prefix of the metrics `min` and `max`, which are the band of a single run.
        missing: What the metric is where a log has no entry for it; None leaves such updates out.
    """
    values = group.values(key, missing)
    if not values:
        return None
    x, of_steps = list(values), list(values.values())
    y = [float(np.mean(of_step)) for of_step in of_steps]
    if len(group.runs) > 1:
        intervals = [t_interval(of_step) for of_step in of_steps]
        return Curve(label, x, y, [interval.low for interval in intervals], [interval.high for interval in intervals])
    if spread is not None:
        low, high = group.values(f"{spread}min"), group.values(f"{spread}max")
        if set(x) <= set(low) and set(x) <= set(high):
            return Curve(label, x, y, [low[step][0] for step in x], [high[step][0] for step in x])
    return Curve(label, x, y)


def _against_tokens(group: Group, agent: str, curve: Curve | None) -> Curve | None:
    """A curve by the tokens that the agent had generated, on average over runs, instead of by update."""
    tokens = group.values(f"{agent}/tokens/generated")
    if curve is None or not tokens:
        return None
    steps = [0, *tokens]
    generated = [0.0, *(float(np.mean(of_step)) for of_step in tokens.values())]
    x = np.interp(curve.x, steps, generated)
    return Curve(curve.label, list(x), curve.y, curve.low, curve.high)


def _present(curves: Sequence[Curve | None]) -> list[Curve]:
    return [curve for curve in curves if curve is not None]


UPDATE, TOKENS = "optimizer update", "tokens the agent had generated"


def _own_bounds(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """Clip bounds of own ratios, where all groups have the same."""
    bounds = {(run.args.epsilon, run.args.epsilon_high) for group in groups for run in group.runs}
    if len(bounds) > 1:
        return []
    ((low, high),) = bounds
    return [("1 − ε", 1 - low), ("1 + ε high", 1 + high)]


def _cross_bounds(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """Clip bounds of peers' ratios at a step's first and last update, where all groups that clip have the same."""
    runs = [run for group in groups for run in group.runs if run.args.algorithm == "hacpo" and run.args.clip_cross]
    bounds = {(run.args.delta, run.args.delta_step, run.updates_per_step) for run in runs}
    if len(bounds) != 1:
        return []
    ((delta, delta_step, updates),) = bounds
    lines = [("upper bound", 1.0), ("first lower bound", cross_lower_bound(delta, delta_step, 0))]
    if updates is not None:
        lines.append(("last lower bound", cross_lower_bound(delta, delta_step, updates - 1)))
    return lines


def _peers(group: Group, agent: str) -> list[str]:
    return [peer for peer in group.agents if peer != agent]


def _named(group: Group, name: str, several: bool) -> str:
    return f"{group.label}: {name}" if several else name


def panels_of(groups: Sequence[Group]) -> list[Panel]:
    """All panels that the groups' logs have something for."""
    agents = list(dict.fromkeys(agent for group in groups for agent in group.agents))
    several = len(groups) > 1
    panels = []

    def add(
        name: str,
        title: str,
        text: str,
        y_label: str,
        curves_of: Callable[[Group, str], list[Curve | None]],
        lines: Sequence[tuple[str, float]] = (),
        x_label: str = UPDATE,
    ):
        subplots = []
        for agent in agents:
            of_agent = [group for group in groups if agent in group.agents]
            curves = _present([curve for group in of_agent for curve in curves_of(group, agent)])
            if curves:
                subplots.append(Subplot(agent, curves, lines))
        if subplots:
            panels.append(Panel(name, title, text, x_label, y_label, subplots))

    def single(key: str, spread: str | None = None) -> Callable[[Group, str], list[Curve | None]]:
        """One curve a group; `spread` is the prefix of the metrics `min` and `max`."""
        return lambda group, agent: [_curve(group, f"{agent}/{key}", group.label, spread and f"{agent}/{spread}")]

    def each_peer(key: str) -> Callable[[Group, str], list[Curve | None]]:
        return lambda group, agent: [
            _curve(group, f"{agent}/{key}/{peer}", _named(group, peer, several)) for peer in _peers(group, agent)
        ]

    def accuracy(group: Group, agent: str) -> list[Curve | None]:
        return [_curve(group, f"eval_{agent}/reward", group.label)]

    def by_tokens(curves_of: Callable[[Group, str], list[Curve | None]]) -> Callable[[Group, str], list[Curve | None]]:
        return lambda group, agent: [_against_tokens(group, agent, curve) for curve in curves_of(group, agent)]

    def discarded(group: Group, agent: str) -> list[Curve | None]:
        return [
            _curve(group, f"{agent}/clip_ratio/cross_{side}", _named(group, side, several))
            for side in ("below", "above")
        ]

    def dropped(group: Group, agent: str) -> list[Curve | None]:
        prefix = f"{agent}/dropped/"
        reasons = sorted(key.removeprefix(prefix) for key in group.metrics if key.startswith(prefix))
        # What was not logged did not happen.
        return [_curve(group, prefix + reason, _named(group, reason, several), missing=0.0) for reason in reasons]

    add(
        "accuracy",
        "Held-out accuracy",
        "Mean reward of sampled answers to the evaluation prompts (avg@k).",
        "avg@k",
        accuracy,
    )
    add(
        "accuracy_by_tokens",
        "Held-out accuracy by generated tokens",
        "The same against what it cost: the tokens that the agent itself had generated for training.",
        "avg@k",
        by_tokens(accuracy),
        x_label=TOKENS,
    )
    add("reward", "Training reward", "Mean reward of the agent's own rollouts.", "reward", single("reward"))
    add(
        "reward_by_tokens",
        "Training reward by generated tokens",
        "The same against the tokens that the agent had generated.",
        "reward",
        by_tokens(single("reward")),
        x_label=TOKENS,
    )
    add("capability", "Capability", "P̂: mean reward over the last K steps (Eq. 9).", "P̂", single("capability"))
    add(
        "capability_ratio",
        "Capability ratio ω",
        "The agent's capability over that of each peer (Eq. 8). Above 1 the agent is the more capable one.",
        "ω",
        each_peer("capability_ratio"),
        [("equal", 1.0)],
    )
    add(
        "own_ratio",
        "Sequence ratios of own rollouts",
        "Mean ratio of the learner's own rollouts that were trained on; the band of a single run is from the smallest "
        "to the largest ratio.",
        "s, own",
        single("own_ratio/mean", "own_ratio/"),
        _own_bounds(groups),
    )
    add(
        "cross_ratio",
        "Sequence ratios of peers' rollouts",
        "Mean ratio of peers' rollouts that were trained on (Eq. 11), with the bounds beyond which they are discarded "
        "(Eq. 13, 14); the band of a single run is from the smallest to the largest ratio.",
        "s, cross",
        single("cross_ratio/mean", "cross_ratio/"),
        _cross_bounds(groups),
    )
    add(
        "discarded",
        "Discarded rollouts of peers",
        "Share of peers' rollouts whose ratio lay below the lower bound or above 1, so that they moved nothing.",
        "share",
        discarded,
    )
    add(
        "alignment",
        "Alignment ρ",
        "Correlation of a peer's confidence over the learner with its rewards (Remark D.13's proxy for the assumption "
        "of Theorem 4.3). Above 0, a peer is surer than the learner where it is right.",
        "ρ",
        each_peer("alignment"),
        [("no correlation", 0.0)],
    )
    add(
        "dropped",
        "Dropped rollouts",
        "Rollouts that the learner could not learn from, by reason, since the log before.",
        "rollouts",
        dropped,
    )
    add(
        "length",
        "Completion lengths",
        "Mean length of the agent's answers, in its tokens; the band of a single run is from the shortest to the "
        "longest.",
        "tokens",
        single("completions/mean_length", "completions/"),
    )
    seconds = [Subplot(group.label, curves) for group in groups if (curves := _seconds_by_phase(group))]
    if seconds:
        text = "Of one step, by phase, for all agents together."
        panels.append(Panel("seconds", "Seconds by phase", text, UPDATE, "seconds", seconds))
    return panels


def _seconds_by_phase(group: Group) -> list[Curve]:
    phases = sorted(key for key in group.metrics if key.startswith("time/"))
    return _present([_curve(group, key, key.removeprefix("time/")) for key in phases])
