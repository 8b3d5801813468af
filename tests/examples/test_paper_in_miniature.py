"""The experiments: what they compare, that nothing is run twice, and what their tables say."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import miniature_experiments as experiments
import miniature_report as report
import paper_in_miniature as script
import pytest
from rich.console import Console

from hacpo_trl import HACPOTrainer
from hacpo_trl.embedded import conv_dataset, conv_reward, policy_path
from hacpo_trl.reporting.drawing import draw


REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "paper_in_miniature.py"


EXPERIMENTS = [
    experiments.MAIN,
    experiments.MAIN_SHORT,
    experiments.TUNING,
    experiments.ABLATION,
    experiments.FACTORIAL,
    experiments.TEMPERATURE,
    experiments.CLIP_RANGE,
    experiments.more_agents([3, 4, 5]),
    experiments.false_positives(0.2),
    *map(experiments.in_setting, experiments.SETTINGS),
]


def settings_of(method, seed=10):
    return script.full_settings(method, seed, script.Scale())


def budget(method, tmp_path) -> dict[str, int]:
    """What a learner of a method gets in a whole run: rollouts, updates, and answers it samples itself."""
    settings = settings_of(method)
    config = script.run_config(settings, str(tmp_path))
    plan = config.step_plan(len(settings["agents"]))
    assert config.max_steps % plan.updates == 0, "the last step of a run would not be whole"
    steps = config.max_steps // plan.updates
    return {
        "rollouts": steps * plan.prompts * plan.rows_per_prompt,
        "updates": config.max_steps,
        "generated": steps * plan.prompts * config.num_generations,
        "prompts": steps * plan.prompts,
    }


@pytest.fixture
def cache(policies_folder, monkeypatch):
    """Where the warm-started policies are kept between runs."""
    monkeypatch.setenv("HACPO_TRL_CACHE", str(policies_folder))


# ------------------------------------------------------------------------------------------------------- definitions


def test_methods_see_what_they_should(tmp_path):
    """In 40 steps of 16 prompts, 8 answers of each agent are 5,120 of its own."""
    budgets = {name: budget(method, tmp_path) for name, method in experiments.METHODS.items()}
    shared = {"rollouts": 10240, "updates": 160, "generated": 5120, "prompts": 640}
    assert budgets["HACPO"] == budgets["naive, learner's log-probs"] == budgets["naive, source's log-probs"] == shared
    assert budgets["GSPOx2"] == budgets["GRPOx2"] == {**shared, "generated": 10240}
    assert budgets["GSPO"] == budgets["GRPO"] == {**shared, "rollouts": 5120, "updates": 80}


@pytest.mark.parametrize("n", [3, 4, 5])
def test_more_agents_sample_no_more_each(n, tmp_path):
    methods = experiments.more_agents([3, 4, 5]).methods
    hacpo, alone = methods[f"HACPO, {n} agents"], methods[f"GSPOx{n}"]
    assert len(hacpo["agents"]) == len(set(hacpo["agents"].values())) == n
    assert budget(hacpo, tmp_path) == {"rollouts": 5120 * n, "updates": 80 * n, "generated": 5120, "prompts": 640}
    assert budget(alone, tmp_path) == {**budget(hacpo, tmp_path), "generated": 5120 * n}
    with pytest.raises(SystemExit, match=r"from 3 to 5, not \[6\]"):
        experiments.more_agents([3, 6])


@pytest.mark.parametrize("name", experiments.SETTINGS)
def test_a_settings_budget_is_the_same_for_all_its_methods(name, tmp_path):
    methods = experiments.in_setting(name).methods
    shared = budget(methods["HACPO"], tmp_path)
    assert budget(methods.pop("GSPOx2"), tmp_path) == {**shared, "generated": 2 * shared["generated"]}
    assert all(budget(method, tmp_path) == shared for method in methods.values())
    if name == "updates":
        assert script.run_config(settings_of(methods["HACPO"]), str(tmp_path)).step_plan(2).updates == 16


@pytest.mark.parametrize(
    "experiment", [experiments.ABLATION, *map(experiments.in_setting, experiments.SETTINGS)], ids=lambda e: e.name
)
def test_each_ablation_differs_from_hacpo_in_one_setting(experiment, tmp_path):
    def config(method):
        return script.run_config(settings_of(experiment.methods[method]), str(tmp_path)).to_dict()

    hacpo, differing = config("HACPO"), []
    for method in [*experiments.ABLATIONS, *experiments.OPTIONS]:
        if method in experiment.methods:
            settings = config(method)
            if not settings["clip_cross"]:
                # What is not clipped has no δ: the short task's wide one is left out.
                settings["delta"] = hacpo["delta"]
            ((changed, value),) = {key: settings[key] for key in hacpo if settings[key] != hacpo[key]}.items()
            differing.append((changed, value))
    assert len(set(differing)) == len(differing) >= 5


def test_the_factorial_has_every_combination_once():
    settings = {label: settings_of(method)["config"] for label, method in experiments.FACTORIAL.methods.items()}
    assert len({json.dumps(s, sort_keys=True) for s in settings.values()}) == 16
    assert (
        settings[" + ".join(experiments.FACTORS)] == settings_of(experiments.short({"HACPO": {}})["HACPO"])["config"]
    )
    switched_off = {key for factor in experiments.FACTORS.values() for key in factor}
    assert switched_off <= settings["none of them"].keys()
    # A mechanism that is named is on: its setting is the default's, so it is not there.
    assert "alpha" not in settings["capability baseline + damping"]
    assert settings["capability baseline + damping"]["clip_cross"] is False


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_method_is_a_valid_run_of_its_own(experiment, tmp_path):
    keys = set()
    for method in experiment.methods.values():
        settings = settings_of(method)
        script.run_config(settings, str(tmp_path)).step_plan(len(settings["agents"]))
        keys.add(script.Runs.key(settings))
    assert len(keys) == len(experiment.methods) and set(experiment.references) <= experiment.methods.keys()


def test_the_key_is_the_recipe_with_what_a_method_changes():
    settings = settings_of({"alpha": 2.0, "false_positives": 0.05}, seed=11)
    assert settings["config"]["prompts_per_step"] == 16 and settings["config"]["learning_rate"] == 3e-4
    assert (settings["config"]["alpha"], settings["config"]["seed"], settings["false_positives"]) == (2.0, 11, 0.05)
    assert (settings["agents"], settings["test_size"]) == ({"qwen": "qwen3-words", "llama": "llama-words"}, 256)
    assert settings["policies"]["qwen"].startswith("qwen3-words-seed11-")
    # What the recipe says about saving changes no result.
    assert not {"output_dir", "save_steps", "task"} & settings["config"].keys()


# ----------------------------------------------------------------------------------------------------------- the runs


def test_a_line_that_was_broken_off_is_no_run(tmp_path):
    runs = script.Runs(tmp_path / "deep" / "runs.jsonl")
    assert runs.read() == {}
    runs.append({"b": 1, "a": 2}, {"value": 0.5})
    with open(runs.path, "a", encoding="utf-8") as file:
        file.write('{"settings": {"a": 3}, "resu')
    # The order of the settings' keys is not part of the key.
    assert runs.read() == {runs.key({"a": 2, "b": 1}): {"value": 0.5}}
    runs.append({"a": 4}, {"value": 0.7})
    assert [json.loads(line)["settings"] for line in runs.path.read_text().splitlines()] == [
        {"b": 1, "a": 2},
        {"a": 4},
    ]


def test_a_run_that_fails_is_named_and_the_others_do_not_begin(cache, tmp_path):
    methods = experiments.short({str(n): {"num_generations": n} for n in (1, 8)})
    wanted = [script.full_settings(method, 0, script.Scale(max_steps=1)) for method in methods.values()]
    runs = script.Runs(tmp_path / "runs.jsonl")
    with pytest.raises(RuntimeError, match=r"runs: .*'num_generations': 1,.* failed") as error:
        script.make_runs(wanted, runs, 1, Console(quiet=True))
    assert "num_generations must be at least 2, not 1" in str(error.value.__cause__)
    assert runs.read() == {}


def test_evaluating_on_the_way_changes_no_training(cache, tmp_path):
    """A run at temperature 1.5 trains as it does without curves and evaluations, which are at temperature 1."""
    method = experiments.short({"hot": {"temperature": 1.5}})["hot"]
    settings = script.full_settings(method, 0, script.Scale(test_size=8, max_steps=8))
    result = script.run(settings)
    trainer = HACPOTrainer(
        {name: policy_path(policy, 0) for name, policy in settings["agents"].items()},
        conv_reward,
        script.run_config(settings, str(tmp_path), logging_steps=1),
        conv_dataset("train", settings["train_size"], 0),
        conv_dataset("test", 8),
    )
    trainer.train()
    log = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert result["metrics"] and all(log[key] == value for key, value in result["metrics"].items())
    assert result["tokens"]["trained"] == sum(
        trainer.token_totals[f"{name}/tokens/trained"] for name in ("qwen", "llama")
    )
    assert [point["update"] for point in result["curve"]] == list(range(9))
    generated = [point["generated"]["qwen"] for point in result["curve"]]
    assert generated == sorted(generated) and generated[0] == 0 < generated[1]
    assert sum(result["curve"][-1]["generated"].values()) == result["tokens"]["generated"]
    # The same policies, sampled at the training's temperature, are worse than what the run reports.
    assert trainer.evaluate()["eval_qwen/reward"] < result["after"]["qwen"]["avg@8"]


@pytest.mark.slow
def test_a_killed_script_continues_and_nothing_is_run_twice(cache, tmp_path):
    command = [sys.executable, str(SCRIPT), "--temperature", "--seeds", "0", "1", "--methods", "HACPO", "GSPOx2"]
    command += ["--max-steps", "4", "--test-size", "8", "--workers", "1", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(REPOSITORY)}
    runs = tmp_path / "runs.jsonl"

    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not runs.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = runs.read_text()
    assert 1 <= first.count("\n") < 4 and first.endswith("\n")

    for _ in range(2):
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        ).stdout
        lines = runs.read_text().splitlines()
        assert runs.read_text().startswith(first) and len(lines) == 4
        assert len({json.dumps(json.loads(line)["settings"], sort_keys=True) for line in lines}) == 4
    assert "on the short task: Accuracy on held-out prompts" in printed and "HACPO" in printed
    assert "| GSPOx2 | " in (tmp_path / "temperature.md").read_text()


def test_the_curves_are_drawn(tmp_path):
    results = {name: [of_method] * 2 for name in experiments.MAIN.methods for of_method in [result(0.5, 0.6)]}
    for of_method in results.values():
        for of_seed in of_method:
            point = {"accuracy": of_seed["after"], "generated": {"qwen": 500.0, "llama": 500.0}}
            of_seed["curve"] = [{"update": update, **point} for update in (0, 80, 160)]
    draw(report.picture(experiments.MAIN, results), tmp_path / "methods.png")
    assert (tmp_path / "methods.png").stat().st_size > 10_000


def test_unknown_methods_are_an_error():
    with pytest.raises(SystemExit, match=r"'main' has no methods \['GPSO'\]; it has \['HACPO', 'GSPO'"):
        experiments.only(experiments.MAIN, ["GPSO"])
    some = experiments.only(experiments.MAIN, ["GRPO"])
    assert (list(some.methods), some.references) == (["GSPOx2", "GRPO"], ["GSPOx2"])


# ------------------------------------------------------------------------------------------------------------- tables


def result(qwen: float, llama: float, **metrics: float) -> dict:
    def accuracy(value):
        return {"avg@8": value, "best@8": min(1.0, 2 * value)}

    return {
        "before": {"qwen": accuracy(0.1), "llama": accuracy(0.2)},
        "after": {"qwen": accuracy(qwen), "llama": accuracy(llama)},
        "tokens": {"generated": 1000.0, "scored": 2000.0, "trained": 3000.0},
        "updates": 160,
        "cpu_seconds": 20.0,
        "metrics": metrics,
    }


def test_the_accuracy_table_by_hand():
    experiment = experiments.Experiment("x", "X", {"ours": {}, "theirs": {}}, ["theirs"])
    # Differences of qwen: 0.1, 0.2, 0.3, mean 0.2 and standard error 0.1 / √3, times 4.3027.
    results = {
        "ours": [result(0.3, 0.4), result(0.5, 0.4), result(0.7, 0.4)],
        "theirs": [result(0.2, 0.3), result(0.3, 0.3), result(0.4, 0.3)],
    }
    table = report.accuracy_table(experiment, results)
    assert table.header[:4] == ["method", "qwen avg@8", "− theirs", "qwen best@8"]
    assert table.rows[0][:3] == ["at the start", "0.100 ± 0.000", ""]
    # The values' own interval: standard deviation 0.2.
    assert table.rows[1][:3] == ["ours", "0.500 ± 0.497", "+0.200 ± 0.248"]
    assert table.rows[2][:3] == ["theirs", "0.300 ± 0.248", ""]
    assert table.markdown().splitlines()[3] == "| ours | " + " | ".join(table.rows[1][1:]) + " |"
    both = report.accuracy_table(experiments.Experiment("x", "X", {}, ["theirs", "ours"]), results)
    assert both.header[:5] == ["method", "qwen avg@8", "− theirs", "− ours", "qwen best@8"]
    assert both.rows[2][:4] == ["theirs", "0.300 ± 0.248", "", "-0.200 ± 0.248"]
    one_seed = report.accuracy_table(experiment, {name: of_method[:1] for name, of_method in results.items()})
    assert one_seed.rows[1][:3] == ["ours", "0.300", "+0.100"]


def test_the_exchange_table_takes_means_and_extremes():
    metrics = [
        {"qwen/cross_ratio/mean": 0.4, "qwen/cross_ratio/min": 0.1, "qwen/cross_ratio/max": 1.5},
        {"qwen/cross_ratio/mean": 0.6, "qwen/cross_ratio/min": 0.2, "qwen/cross_ratio/max": 1.2},
    ]
    for of_seed in metrics:
        of_seed |= {"llama/cross_ratio/mean": 0.8, "qwen/capability_ratio/llama": 1.25}
    experiment = experiments.Experiment("x", "X", {"ours": {}, "alone": {}}, ["ours"])
    results = {"ours": [result(0.5, 0.5, **of_seed) for of_seed in metrics], "alone": [result(0.5, 0.5)] * 2}
    ((method, mean, smallest, largest, *_, ratio, alignment),) = report.exchange_table(experiment, results).rows
    assert (method, mean, smallest, largest) == ("ours", "0.50 / 0.80", "0.10 / ", "1.50 / ")
    assert (ratio, alignment) == ("1.25 / ", "")
    assert report.exchange_table(experiment, {"alone": results["alone"]}) is None


def test_the_effects_table_names_what_is_on():
    experiment = experiments.Experiment("x", "X", {}, ["none of them"], factors=("a", "b"))
    # qwen: 0.1 + 0.3 a + 0.1 b + 0.2 ab, llama: the same everywhere.
    values = {"none of them": 0.1, "a": 0.4, "b": 0.2, "a + b": 0.7}
    results = {label: [result(value, 0.5)] * 2 for label, value in values.items()}
    assert report.effects_table(experiment, results).rows == [
        ["a", "+0.400 ± 0.000", "+0.000 ± 0.000"],
        ["b", "+0.200 ± 0.000", "+0.000 ± 0.000"],
        ["a x b", "+0.100 ± 0.000", "+0.000 ± 0.000"],
    ]


def test_a_report_gets_its_blocks_and_keeps_its_words():
    words = "Words.\n<!-- begin x -->\nold\n<!-- end x -->\nMore words.\n<!-- begin y -->\n<!-- end y -->\n"
    once = report.with_block(words, "x", "new")
    assert once == words.replace("old", "new") and report.with_block(once, "x", "new") == once
    with pytest.raises(ValueError, match="no place for the experiment 'z'"):
        report.with_block(words, "z", "new")
