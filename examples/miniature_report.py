"""What `paper_in_miniature.py` says of its runs: tables, a picture, and a report's blocks."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniature_experiments import Experiment, factorial_label

from hacpo_trl.reporting.panels import Curve, Panel, Subplot
from hacpo_trl.reporting.statistics import Estimate, factorial_effects, holm, paired_difference, t_interval
from hacpo_trl.reporting.tables import Table


Results = Mapping[str, Sequence[Mapping[str, Any]]]  # method -> a result for each seed, in the order of seeds


def number(estimate: Estimate | float, sign: str = "") -> str:
    """`0.855 ± 0.041`: a mean and half of its 95 % interval."""
    if isinstance(estimate, float):
        return f"{estimate:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} ± {estimate.high - estimate.value:.3f}"


def mean(values: Sequence[float]) -> Estimate | float:
    """With its interval where there is more than one seed."""
    return t_interval(values) if len(values) > 1 else float(values[0])


def difference(values: Sequence[float], reference: Sequence[float]) -> Estimate | float:
    return paired_difference(values, reference) if len(values) > 1 else float(values[0] - reference[0])


def final(results: Sequence[Mapping[str, Any]], agent: str, metric: str = "avg@8", when: str = "after") -> list[float]:
    """One agent's accuracy for each seed."""
    return [result[when][agent][metric] for result in results]


def accuracy_table(experiment: Experiment, results: Results) -> Table:
    """Held-out accuracy of every method, and its paired differences to the references.

    A star is with those differences that survive Holm's correction over all of the table.
    """
    header = ["method"]
    for agent in experiment.agents:
        header += [f"{agent} avg@8", *(f"− {name}" for name in experiment.references), f"{agent} best@8"]
    start, rows = ["at the start"], []
    for agent in experiment.agents:
        initial = results[experiment.references[0]]
        before, best = (mean(final(initial, agent, metric, "before")) for metric in ("avg@8", "best@8"))
        start += [number(before), *[""] * len(experiment.references), number(best)]
    stars = surviving(experiment, results)
    for method, of_method in results.items():
        rows.append([method])
        for agent in experiment.agents:
            values = final(of_method, agent)
            rows[-1].append(number(mean(values)))
            for name in experiment.references:
                against = number(difference(values, final(results[name], agent)), "+")
                star = "*" if (method, agent, name) in stars else ""
                rows[-1].append("" if method == name else against + star)
            rows[-1].append(number(mean(final(of_method, agent, "best@8"))))
    return Table(header, [start, *rows])


def surviving(experiment: Experiment, results: Results) -> set[tuple[str, str, str]]:
    """The comparisons (method, agent, reference) of a table that survive Holm's correction."""
    pairs: dict[frozenset[str], tuple[str, str]] = {}
    for method in results:
        for name in experiment.references:
            if method != name:
                # Two references are compared once.
                pairs.setdefault(frozenset((method, name)), (method, name))
    family = [(method, agent, name) for method, name in pairs.values() for agent in experiment.agents]
    if len(next(iter(results.values()))) < 2:
        return set()
    differences = [
        [a - b for a, b in zip(final(results[method], agent), final(results[name], agent), strict=True)]
        for method, agent, name in family
    ]
    found = {comparison for comparison, survives in zip(family, holm(differences), strict=True) if survives}
    return found | {(name, agent, method) for method, agent, name in found}


def cost_table(results: Results) -> Table:
    """Updates, tokens and CPU seconds of a run, evaluations included in the seconds."""
    header = ["method", "updates", "generated tokens", "scored", "trained", "CPU s"]
    rows = []
    for method, of_method in results.items():
        count = len(of_method)
        tokens = [sum(r["tokens"][kind] for r in of_method) / count for kind in ("generated", "scored", "trained")]
        seconds = sum(r["cpu_seconds"] for r in of_method) / count
        rows.append([method, str(of_method[0]["updates"]), *(f"{t:,.0f}" for t in tokens), f"{seconds:.0f}"])
    return Table(header, rows)


# Title, prefix of the metrics of an agent, and how seeds (and peers) are put together.
EXCHANGE_COLUMNS = (
    ("cross ratio", "cross_ratio/mean", statistics.fmean),
    ("smallest", "cross_ratio/min", min),
    ("largest", "cross_ratio/max", max),
    ("discarded below", "clip_ratio/cross_below", statistics.fmean),
    ("discarded above", "clip_ratio/cross_above", statistics.fmean),
    ("ω", "capability_ratio/", statistics.fmean),
    ("ρ", "alignment/", statistics.fmean),
)


def exchange_table(experiment: Experiment, results: Results) -> Table | None:
    """What the exchange looked like in the last tenth of the updates, for each agent as the learner."""
    header = ["method", *(f"{title}, {' / '.join(experiment.agents)}" for title, _, _ in EXCHANGE_COLUMNS)]
    rows = []
    for method, of_method in results.items():
        row = [method]
        for _, prefix, together in EXCHANGE_COLUMNS:
            cells = []
            for agent in experiment.agents:
                metrics = [item for result in of_method for item in result["metrics"].items()]
                values = [value for key, value in metrics if key.startswith(f"{agent}/{prefix}")]
                cells.append(f"{together(values):.2f}" if values else "")
            row.append(" / ".join(cells) if any(cells) else "")
        if row[1]:
            rows.append(row)
    return Table(header, rows) if rows else None


def effects_table(experiment: Experiment, results: Results) -> Table:
    """Main effects and two-factor interactions of a factorial design on avg@8."""
    combinations = list(itertools.product((False, True), repeat=len(experiment.factors)))
    effects = {
        agent: factorial_effects(
            {on: final(results[factorial_label(experiment.factors, on)], agent) for on in combinations}
        )
        for agent in experiment.agents
    }
    return Table(
        ["effect on avg@8", *experiment.agents],
        [
            [" x ".join(experiment.factors[i] for i in subset)]
            + [number(effects[agent][subset], "+") for agent in experiment.agents]
            for subset in next(iter(effects.values()))
        ],
    )


def curve_of(method: str, results: Sequence[Mapping[str, Any]], agent: str) -> Curve:
    """One agent's held-out accuracy against the tokens it generated: mean over seeds, with its 95 % interval."""
    points = list(zip(*(result["curve"] for result in results), strict=True))
    tokens = [statistics.fmean(point["generated"][agent] for point in of_seeds) / 1000 for of_seeds in points]
    estimates = [t_interval([point["accuracy"][agent]["avg@8"] for point in of_seeds]) for of_seeds in points]
    values, low, high = zip(*((e.value, e.low, e.high) for e in estimates), strict=True)
    return Curve(method, tokens, values, low, high)


def picture(experiment: Experiment, results: Results) -> Panel:
    """Held-out accuracy against generated tokens, a subplot for each agent."""
    return Panel(
        name=experiment.picture,
        title=experiment.title,
        text="",
        x_label="tokens it generated, thousands",
        y_label="mean reward on held-out prompts",
        subplots=[
            Subplot(agent, [curve_of(method, of_method, agent) for method, of_method in results.items()])
            for agent in experiment.agents
        ],
    )


def write_block(report: Path, name: str, content: str):
    report.write_text(with_block(report.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def with_block(report: str, name: str, content: str) -> str:
    """Puts an experiment's tables between its two marks in a report."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if report.count(begin) != 1 or report.count(end) != 1:
        raise ValueError(f"The report has no place for the experiment {name!r}. It needs the lines {begin} and {end}.")
    head, _, rest = report.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def tables(experiment: Experiment, results: Results) -> dict[str, Table]:
    found = {"Accuracy on held-out prompts": accuracy_table(experiment, results)}
    if experiment.factors:
        found["Effects"] = effects_table(experiment, results)
    found["Cost of a run"] = cost_table(results)
    exchanged = exchange_table(experiment, results)
    return found | ({"Exchange at the end": exchanged} if exchanged is not None else {})
