"""What `paper_in_miniature.py` compares: methods and experiments, as data."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


# A method is what its settings change in the recipe: HACPOConfig's, and this script's `agents` (name -> policy) and
# `false_positives`.
Settings = Mapping[str, Any]

TWO_AGENTS = {"qwen": "qwen3-words", "llama": "llama-words"}
SHORT_AGENTS = {"qwen": "qwen3", "llama": "llama"}

# GSPO and GRPO see half the rollouts that a learner of HACPO sees, in half the updates.
GSPO = {"algorithm": "gspo", "max_steps": 80}
# x2: as many rollouts and updates as a learner of HACPO, all of them its own.
GSPO_X2 = {"algorithm": "gspo", "num_generations": 16}
NAIVE_LEARNER = {"algorithm": "naive"}
NAIVE_SOURCE = {"algorithm": "naive", "naive_old_logprobs": "source"}

METHODS: dict[str, Settings] = {
    "HACPO": {},
    "GSPO": GSPO,
    "GSPOx2": GSPO_X2,
    "GRPO": {"algorithm": "grpo", "max_steps": 80},
    "GRPOx2": {"algorithm": "grpo", "num_generations": 16},
    "naive, learner's log-probs": NAIVE_LEARNER,
    "naive, source's log-probs": NAIVE_SOURCE,
}

# GSPO's clip range for sequence ratios of own rollouts, which HACPO keeps; ten times as wide; GRPO's for token ratios.
WIDER, WIDEST = {"epsilon": 3e-3, "epsilon_high": 4e-3}, {"epsilon": 0.2, "epsilon_high": 0.28}

# What matters most, and differs by method: tuned for each one apart, on seeds that nothing is compared on.
TUNING_SEEDS = [0, 1]
LEARNING_RATES = (1e-4, 2e-4, 3e-4, 5e-4)
OTHER_CLIP_RANGE: dict[str, Settings] = {
    "HACPO, ε .2 / .28": WIDEST,
    "GSPOx2, ε .2 / .28": {**GSPO_X2, **WIDEST},
}

ABLATIONS: dict[str, Settings] = {
    "no capability baseline": {"advantage_baseline": "own"},
    "no capability weight": {"capability_weighting": False},
    "no damping, α = 0": {"alpha": 0.0},
    "no stepwise bound, δ_step = 0": {"delta_step": 0.0},
    "no clipping": {"clip_cross": False},
}

# The paper's four mechanisms; each is on unless its setting is applied.
FACTORS: dict[str, Settings] = {
    "capability baseline": {"advantage_baseline": "own"},
    "capability weight": {"capability_weighting": False},
    "damping": {"alpha": 0.0},
    "clipping": {"clip_cross": False},
}
NO_MECHANISM: dict[str, Settings] = {
    "none of the mechanisms": {key: value for off in FACTORS.values() for key, value in off.items()}
}

# Ours, in place of the capability baseline; see docs/theory.md.
SHRINKAGE: dict[str, Settings] = {"shrinkage baseline": {"advantage_baseline": "shrinkage"}}

OPTIONS: dict[str, Settings] = {
    "α = 2": {"alpha": 2.0},
    "α = 3": {"alpha": 3.0},
    "δ = 0.2": {"delta": 0.2},
    "ratios by each side's own length": {"ratio_normalization": "own"},
    "own rollouts first": {"minibatch_order": "self_first"},
    "K = 1": {"capability_window": 1},
    "K = 20": {"capability_window": 20},
}


def short(methods: Mapping[str, Settings], agents: Mapping[str, str] = SHORT_AGENTS) -> dict[str, Settings]:
    """The same methods on the short task, of four and six tokens an answer, whose ratios ask for a wider δ."""
    shortened = {}
    for name, settings in methods.items():
        clips = settings.get("algorithm", "hacpo") == "hacpo" and settings.get("clip_cross", True)
        wide = {"delta": 0.8} if clips else {}
        shortened[name] = {"agents": agents, "max_completion_length": 8, "learning_rate": 1e-4, **wide, **settings}
    return shortened


@dataclass(frozen=True)
class Experiment:
    """Methods that are compared.

    Attributes:
        name: Name of its files and of its block in a report.
        title: One line.
        methods: For each method its settings.
        references: The methods that the others are paired with.
        agents: The agents that the table shows.
        factors: Of a factorial design, its factors' names; the methods are then all their combinations.
        option: The option of this script that asks for it.
        picture: Name of the picture of its curves, if they are drawn.
    """

    name: str
    title: str
    methods: Mapping[str, Settings]
    references: Sequence[str]
    agents: Sequence[str] = tuple(TWO_AGENTS)
    factors: Sequence[str] = ()
    option: str = ""
    picture: str = ""


def factorial(factors: Mapping[str, Settings]) -> dict[str, Settings]:
    """All combinations of mechanisms, by what is on."""
    methods = {}
    for on in itertools.product((False, True), repeat=len(factors)):
        off = [settings for settings, is_on in zip(factors.values(), on, strict=True) if not is_on]
        methods[factorial_label(factors, on)] = {key: value for settings in off for key, value in settings.items()}
    return methods


def factorial_label(factors: Iterable[str], on: Sequence[bool]) -> str:
    return " + ".join(name for name, is_on in zip(factors, on, strict=True) if is_on) or "none of them"


TUNING = Experiment(
    "tuning",
    "Learning rates and own clip ranges",
    {
        f"{name}, {rate:g}": {**settings, "learning_rate": rate}
        for name, settings in {**METHODS, **OTHER_CLIP_RANGE}.items()
        for rate in LEARNING_RATES
    },
    ["GSPOx2, 0.0001"],
    option="--tune",
)
# Each method at what it was best at in TUNING; alone with as many rollouts, the rate and the range of twice as many.
TUNED: dict[str, Settings] = {
    "HACPO": {**WIDEST, "learning_rate": 3e-4},
    "GSPO": {**GSPO, **WIDEST, "learning_rate": 3e-4},
    "GSPOx2": {**GSPO_X2, **WIDEST, "learning_rate": 3e-4},
    "GRPO": {**METHODS["GRPO"], "learning_rate": 3e-4},
    "GRPOx2": {**METHODS["GRPOx2"], "learning_rate": 3e-4},
    "naive, source's log-probs": {**NAIVE_SOURCE, "learning_rate": 3e-4},
}
MAIN = Experiment("main", "Methods, each at its best", TUNED, ["GSPOx2", "GSPO"], picture="methods")
MAIN_SHORT = Experiment(
    "main-short", "Methods, on the short task", short(METHODS), ["GSPOx2", "GRPOx2"], option="--short"
)
ABLATION = Experiment(
    "ablations",
    "Mechanisms and options, on the short task",
    short({"HACPO": {}, **ABLATIONS, **NO_MECHANISM, **SHRINKAGE, **OPTIONS}),
    ["HACPO"],
    option="--ablations",
)
FACTORIAL = Experiment(
    "factorial",
    "All combinations of four mechanisms, on the short task",
    short(factorial(FACTORS)),
    ["none of them"],
    factors=tuple(FACTORS),
    option="--factorial",
)
TEMPERATURE = Experiment(
    "temperature",
    "Hotter sampling of an agent's own rollouts, on the short task",
    short(
        {
            "HACPO": {},
            "GSPOx2": GSPO_X2,
            "GSPOx2, temperature 1.2": {**GSPO_X2, "temperature": 1.2},
            "GSPOx2, temperature 1.5": {**GSPO_X2, "temperature": 1.5},
            "GSPOx2, top-p 0.9": {**GSPO_X2, "top_p": 0.9},
            "GSPOx2, temperature 1.2, top-p 0.9": {**GSPO_X2, "temperature": 1.2, "top_p": 0.9},
            "GSPOx2, temperature 1.5, top-p 0.9": {**GSPO_X2, "temperature": 1.5, "top_p": 0.9},
            "HACPO, temperature 1.2": {"temperature": 1.2},
        }
    ),
    ["GSPOx2"],
    option="--temperature",
)

CLIP_RANGE = Experiment(
    "clip-range",
    "The clip range of own rollouts, on the short task",
    short(
        {
            "HACPO": {},
            "HACPO, ε .003 / .004": WIDER,
            "HACPO, ε .2 / .28": WIDEST,
            "GSPO": GSPO,
            "GSPO, ε .2 / .28": {**GSPO, **WIDEST},
            "GSPOx2": GSPO_X2,
            "GSPOx2, ε .003 / .004": {**GSPO_X2, **WIDER},
            "GSPOx2, ε .2 / .28": {**GSPO_X2, **WIDEST},
            "GRPOx2": METHODS["GRPOx2"],
        }
    ),
    ["HACPO, ε .2 / .28", "GRPOx2"],
    option="--clip-range",
)

FURTHER_AGENTS = {"third": "llama-comma", "fourth": "qwen3-comma", "fifth": "llama-bytes"}


def more_agents(numbers: Sequence[int]) -> Experiment:
    """HACPO with more agents, 16 prompts x 8 own rollouts in 40 steps for each of them, and GSPO with as many rollouts
    as such a learner sees.

    Agents of GSPO learn alone, so that it needs only those which the table shows.
    """
    most = len(TWO_AGENTS) + len(FURTHER_AGENTS)
    if unknown := [n for n in numbers if not len(TWO_AGENTS) < n <= most]:
        raise SystemExit(f"--agents takes numbers from {len(TWO_AGENTS) + 1} to {most}, not {unknown}.")
    methods: dict[str, Settings] = {"GSPO": GSPO, "HACPO, 2 agents": {}, "GSPOx2": GSPO_X2}
    for n in numbers:
        agents = dict(list({**SHORT_AGENTS, **FURTHER_AGENTS}.items())[:n])
        methods[f"HACPO, {n} agents"] = {"agents": agents, "max_steps": 80 * n}
        methods[f"GSPOx{n}"] = {"algorithm": "gspo", "num_generations": 8 * n, "max_steps": 80 * n}
    return Experiment(
        "agents",
        "More agents, on the short task",
        short(methods),
        ["GSPO"],
        option=f"--agents {' '.join(map(str, numbers))}",
    )


def false_positives(probability: float) -> Experiment:
    """The verifier of the training accepts wrong answers with this probability."""
    methods = {name: {**METHODS[name], "false_positives": probability} for name in ("HACPO", "GSPO", "GSPOx2")}
    return Experiment(
        f"false-positives-{probability:g}",
        f"A verifier that accepts {probability:.0%} of the wrong answers, on the short task",
        short(methods),
        ["GSPOx2"],
        option=f"--false-positives {probability:g}",
    )


SETTINGS: dict[str, tuple[str, Settings]] = {
    "gap": (
        "A gap in capability: one agent hardly ever right",
        {"agents": {"qwen": "qwen3-strong", "llama": "llama-weak"}, "max_steps": 80},
    ),
    "wide-gap": (
        "A wider gap: one agent next to never right",
        {"agents": {"qwen": "qwen3-strong", "llama": "llama-weaker"}, "max_steps": 80},
    ),
    "updates": (
        "16 updates a step, at a higher learning rate",
        {"prompts_per_step": 64, "learning_rate": 3e-4, "max_steps": 80},
    ),
    "adversary": (
        "A collaborator that is confidently wrong",
        {"agents": {"qwen": "qwen3", "llama": "llama-wrong"}, "max_steps": 80},
    ),
}


def in_setting(name: str) -> Experiment:
    """HACPO, HACPO without each mechanism, and what it is compared with, in another setting than the recipe's."""
    title, setting = SETTINGS[name]
    others = {"naive, source's log-probs": NAIVE_SOURCE, "GSPOx2": GSPO_X2}
    methods = {"HACPO": {}, **ABLATIONS, **NO_MECHANISM, **SHRINKAGE, **others}
    methods = short({method: {**setting, **settings} for method, settings in methods.items()})
    return Experiment(name, title, methods, ["HACPO"], option=f"--settings {name}")


def only(experiment: Experiment, methods: Sequence[str] | None) -> Experiment:
    """The experiment with some of its methods, and always its first reference."""
    if methods is None:
        return experiment
    if unknown := [name for name in methods if name not in experiment.methods]:
        raise SystemExit(f"'{experiment.name}' has no methods {unknown}; it has {list(experiment.methods)}.")
    kept = {*methods, experiment.references[0]}
    return replace(
        experiment,
        methods={name: settings for name, settings in experiment.methods.items() if name in kept},
        references=[name for name in experiment.references if name in kept],
    )
