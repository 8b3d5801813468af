import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacpo_trl
from hacpo_trl.agent import PLAIN_TEMPLATE
from hacpo_trl.commands.evaluate import main, parse_args
from hacpo_trl.embedded.policies import POLICIES, warm_up
from hacpo_trl.evaluation import metrics, models, tasks
from hacpo_trl.evaluation.metrics import Metric, best_at_k, bootstrap, group_equal_answers, majority, pass_at_k
from hacpo_trl.evaluation.run import evaluate, prepare
from hacpo_trl.generation.transformers_generation import TransformersGeneration


@pytest.fixture(autouse=True)
def errors_as_they_are(monkeypatch):
    """Not in a line, as the command has them."""
    monkeypatch.setenv("HACPO_TRL_TRACEBACK", "1")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Policies this small are slower on two threads; and the killed process must compute as this one does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- metrics -------------------------------------------------------------------------------------------------------
def test_pass_at_k_by_hand():
    # 2 of 5 right. k = 2: 3 of the 10 pairs hold no right one. k = 4: every four of them hold one.
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 5, 1) == 1.0


def test_best_at_k_by_hand():
    # The pairs of 0, 0.5 and 1 have the maxima 0.5, 1 and 1.
    assert best_at_k([1.0, 0.0, 0.5], 2) == pytest.approx(2.5 / 3)
    assert best_at_k([1.0, 0.0, 0.5], 1) == pytest.approx(0.5)
    assert best_at_k([0.2, 0.0, 0.5], 3) == 0.5


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_best_and_pass_at_k_are_means_over_all_draws(k):
    for rewards in ([1, 0, 0, 1, 0, 0], [0.3, -1.0, 0.3, 1.0, 0.0, 2.0]):
        draws = list(itertools.combinations(rewards, k))
        assert best_at_k(rewards, k) == pytest.approx(np.mean([max(draw) for draw in draws]))
        right = [any(reward >= 1 for reward in draw) for draw in draws]
        assert Metric("pass", k)(rewards, [None] * 6) == pytest.approx(np.mean(right))


def test_majority_by_hand():
    assert majority([1, 0, 0, 0], ["6", "5", "5", None]) == 0.0
    assert majority([1, 1, 0, 0], ["6", "6", "5", "4"]) == 1.0
    # Of two leading answers one is right, of three one.
    assert majority([1, 1, 0, 0, 0], ["6", "6", "5", "5", "4"]) == 0.5
    assert majority([1, 0, 0], ["6", "5", "4"]) == pytest.approx(1 / 3)
    # Samples without an answer are no block of votes.
    assert majority([0, 0, 0, 1], [None, None, None, "6"]) == 1.0
    assert majority([0, 0], [None, None]) == 0.0


def test_metrics_of_one_problem_by_hand():
    rewards, groups = [1, 0, 0, 1, 1, 0, 1], ["a", "b", "b", "a", "a", "b", "a"]
    assert Metric("avg", 1)(rewards, groups) == Metric("avg", 7)(rewards, groups) == pytest.approx(4 / 7)
    # Blocks of 3: b leads, then a; the last sample is in no block.
    assert Metric("maj", 3)(rewards, groups) == 0.5
    assert Metric("maj", 7)(rewards, groups) == 1.0
    assert Metric("best", 7)(rewards, groups) == 1.0
    with pytest.raises(ValueError, match="best@8 needs 8 samples of each problem; there are 7"):
        Metric("best", 8)(rewards, groups)


def test_metrics_are_written_as_they_are_read():
    assert [str(Metric.parse(text)) for text in ("avg@1", "best@30")] == ["avg@1", "best@30"]
    for text in ("avg", "mean@3", "pass@0", "pass@"):
        with pytest.raises(ValueError, match="A metric is avg@k, pass@k, best@k or maj@k"):
            Metric.parse(text)


def test_equal_answers_are_grouped_round_by_round():
    answers = [["0.5", None, "1/2", "3", "3", "3.0"], ["2"], [None], ["7", "8", "7"]]
    asked = []

    def equal(pairs):
        asked.append(pairs)
        return [pair in {("3", "3.0"), ("0.5", "1/2")} for pair in pairs]

    groups = group_equal_answers(answers, equal)
    assert groups == [[1, None, 1, 0, 0, 0], [0], [None], [0, 1, 0]]
    # The most frequent text speaks for its group; all problems are asked about at once.
    assert asked[0] == [("3", "0.5"), ("3", "1/2"), ("3", "3.0"), ("7", "8")]
    assert asked[1] == [("0.5", "1/2")]


def test_answers_that_are_equal_as_mathematics_vote_together():
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{3}", r"\boxed{3}", r"So \boxed{1/2}.", "none"]
    rewards, answers = tasks.judge_math(texts, ["0.5"] * len(texts))
    assert rewards == [1, 1, 0, 0, 1, 0] and answers[5] is None
    (groups,) = group_equal_answers([answers], tasks.equal_in_math)
    assert groups[0] == groups[1] == groups[4] != groups[2] == groups[3] and groups[5] is None
    assert majority(rewards, groups) == 1.0


# ---- intervals -----------------------------------------------------------------------------------------------------
def test_equal_values_have_no_uncertainty():
    estimate = bootstrap([0.5] * 20)
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)


def test_the_interval_of_a_share_is_the_known_one():
    """40 of 100: the standard error is sqrt(0.4 * 0.6 / 100) = 0.049, and a 95% interval 1.96 of it to each side."""
    values = [1.0] * 40 + [0.0] * 60
    estimate = bootstrap(values)
    assert estimate.value == pytest.approx(0.4)
    assert estimate.low == pytest.approx(0.4 - 0.096, abs=0.011) and estimate.high == pytest.approx(0.496, abs=0.011)
    assert bootstrap(values) == estimate
    # Four times the problems, half the width.
    wide = bootstrap(values * 4)
    assert wide.high - wide.low == pytest.approx((estimate.high - estimate.low) / 2, rel=0.1)


def test_the_seed_decides_the_resamples():
    values = np.random.default_rng(0).normal(size=30)
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1) != bootstrap(values, seed=2)


def test_resamples_do_not_depend_on_how_they_are_drawn_in_chunks(monkeypatch):
    values = list(range(10))
    whole = bootstrap(values, num_resamples=500)
    monkeypatch.setattr(metrics, "CHUNK", 70)
    assert bootstrap(values, num_resamples=500) == whole


def test_a_paired_difference_is_surer_than_its_parts():
    """One model is better by 0.1 on every problem, easy or hard: that is certain, though neither mean is."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 2, 50) * 0.5
    second = first + 0.125
    difference = bootstrap(second - first)
    assert (difference.value, difference.low, difference.high) == (0.125, 0.125, 0.125)
    assert bootstrap(first).high > bootstrap(second).low
    with pytest.raises(ValueError, match="no problem"):
        bootstrap([])


# ---- agents of a run -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a training run leaves: two agents, one of them warm, and a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    qwen = tiny.policy("qwen")
    warm_up(qwen, tiny.tokenizer("qwen"), POLICIES["qwen3"], seed=0, steps=120)
    agents = [
        {
            "name": "qwen",
            "chat_template": "{{ tail }}{{ messages[0]['content'] }}",
            "chat_template_kwargs": {"tail": "~"},
        },
        {"name": "llama", "chat_template": "plain"},
    ]
    trainer = tiny.trainer(folder, models={"qwen": qwen, "llama": tiny.policy("llama")}, agents=agents)
    trainer.save_model()
    trainer.save_model(str(folder / "checkpoint-1"))
    return folder, trainer


def arguments(run, output_dir, *more):
    return ["--run", str(run[0]), "--benchmarks", "conv", "--output-dir", str(output_dir), *more]


def results(output_dir):
    return json.loads((output_dir / "results.json").read_text())


def completions(output_dir, model):
    table = pd.read_parquet(output_dir / "completions" / model / "conv")
    return table.sort_values(["problem", "sample"]).reset_index(drop=True)


SETTINGS = ("--limit", "60", "--num-samples", "4", "--batch-size", "6")


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """The unbroken evaluation of both agents that others are compared with."""
    folder = tmp_path_factory.mktemp("evaluation")
    main(arguments(run, folder, *SETTINGS))
    return folder


def test_a_run_from_the_command_line_to_the_table(run, evaluated):
    name = run[0].name
    qwen, llama = f"{name}/qwen", f"{name}/llama"
    content = results(evaluated)
    by_metric = {(row["model"], row["metric"]): row for row in content["results"]}
    assert list(by_metric) == [(m, k) for m in (llama, qwen) for k in ("avg@4", "best@4", "maj@4")]
    # The table says what the completions say.
    table = completions(evaluated, f"{name}-qwen")
    expected = [(problem, sample) for problem in range(60) for sample in range(4)]
    assert list(zip(table["problem"], table["sample"], strict=True)) == expected
    rewards = table["reward"].to_numpy().reshape(60, 4)
    assert 0.02 < rewards.mean() < 0.9
    assert by_metric[qwen, "avg@4"]["value"] == pytest.approx(rewards.mean())
    assert by_metric[qwen, "best@4"]["value"] == pytest.approx(rewards.max(axis=1).mean())
    assert by_metric[llama, "avg@4"]["value"] == 0.0 == by_metric[llama, "avg@4"]["high"]
    assert by_metric[qwen, "avg@4"]["low"] < rewards.mean() < by_metric[qwen, "avg@4"]["high"]
    right = [answer in gold.split("|") for answer, gold in zip(table["answer"], table["gold"], strict=True)]
    assert right == list(table["reward"] == 1.0)
    assert table["tokens"].max() <= 8 and set(table["finish_reason"]) <= {"stop", "length"}
    # Different samples of a prompt, not one sample four times.
    assert table.groupby("problem")["completion"].nunique().max() > 1
    difference = next(row for row in content["comparisons"] if row["metric"] == "avg@4")
    assert (difference["model"], difference["other"]) == (llama, qwen)
    assert difference["value"] == pytest.approx(-rewards.mean()) and difference["high"] < 0
    markdown = (evaluated / "results.md").read_text()
    assert f"| benchmark | metric | problems | {llama} | {qwen} |" in markdown
    assert f"| conv | avg@4 | 60 | 0.0 [0.0, 0.0] | {100 * rewards.mean():.1f} [" in markdown
    assert " * |" in markdown and "An interval of width 0" in markdown


def test_a_killed_evaluation_continues_to_the_same_table(run, evaluated, tmp_path):
    package = Path(hacpo_trl.__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "hacpo_trl.evaluate", *arguments(run, tmp_path, *SETTINGS)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    shards = tmp_path / "completions"
    deadline = time.monotonic() + 120
    while not list(shards.rglob("batch-*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read().decode()
        time.sleep(0.005)
    process.kill()
    process.wait()
    process.stdout.close()
    there = {path: path.stat().st_mtime_ns for path in shards.rglob("batch-*.parquet")}
    assert 0 < len(there) < 80 and not (tmp_path / "results.json").exists()

    main(arguments(run, tmp_path, *SETTINGS))
    assert all(path.stat().st_mtime_ns == written for path, written in there.items())
    assert results(tmp_path) == results(evaluated)
    assert (tmp_path / "results.md").read_text() == (evaluated / "results.md").read_text()
    for agent in ("qwen", "llama"):
        pd.testing.assert_frame_equal(
            completions(tmp_path, f"{run[0].name}-{agent}"), completions(evaluated, f"{run[0].name}-{agent}")
        )


def test_a_finished_evaluation_loads_no_weights_again(run, evaluated, monkeypatch, capsys):
    monkeypatch.setattr("hacpo_trl.evaluation.run.load_backend", None)
    before = results(evaluated)
    main(arguments(run, evaluated, *SETTINGS))
    assert results(evaluated) == before and "Continuing: 480 of 480 answers are there." in capsys.readouterr().out


@pytest.fixture
def copied(evaluated, tmp_path):
    """An evaluation that may be damaged."""
    return shutil.copytree(evaluated, tmp_path / "copied")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeroed(data: bytes) -> bytes:
    """The first page's bytes, as a disk that was full leaves them."""
    return data[:4] + bytes(200) + data[204:]


def of_fewer_answers(data: bytes) -> bytes:
    table, file = pq.read_table(io.BytesIO(data)), io.BytesIO()
    pq.write_table(table.slice(1), file)
    return file.getvalue()


@pytest.mark.parametrize("damage", [cut, zeroed, of_fewer_answers, lambda data: b""])
def test_parts_that_are_damaged_are_made_anew(run, evaluated, copied, damage, caplog):
    parts = sorted((copied / "completions").rglob("batch-*.parquet"))[::50]
    for part in parts:
        part.write_bytes(damage(part.read_bytes()))
    main(arguments(run, copied, *SETTINGS))
    assert results(copied) == results(evaluated)
    assert all(str(part) in caplog.text for part in parts) and caplog.text.count("sampled anew") == len(parts)


def test_settings_that_cannot_be_read_are_named(run, copied):
    path = next((copied / "completions").rglob("_settings.json"))
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match=r"_settings.json cannot be read .* Remove .* to begin anew"):
        main(arguments(run, copied, *SETTINGS))


def test_verdicts_of_another_version_are_made_anew_from_the_same_answers(run, evaluated, copied, monkeypatch, caplog):
    monkeypatch.setattr("hacpo_trl.evaluation.run.load_backend", None)
    for path in (copied / "completions").rglob("_settings.json"):
        settings = json.loads(path.read_text())
        settings["judged_by"]["math-verify"] = "0.1"
        path.write_text(json.dumps(settings))
    for path in (copied / "completions").rglob("batch-*.parquet"):
        table = pq.read_table(path)
        rewards = pa.array([0.25] * table.num_rows)
        pq.write_table(table.set_column(table.column_names.index("reward"), "reward", rewards), path)
    main(arguments(run, copied, *SETTINGS))
    assert results(copied) == results(evaluated) and "math-verify 0.1, and are judged anew" in caplog.text
    caplog.clear()
    main(arguments(run, copied, *SETTINGS))
    assert "judged anew" not in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperature", "0.7"), r"\(temperature: 1.0 there, 0.7 now\)"),
        (("--batch-size", "12"), r"\(batch_size: 6 there, 12 now\)"),
        (("--limit", "12"), r"\(problems: '.*' there, '.*' now\)"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(run, evaluated, more, message):
    with pytest.raises(ValueError, match=message):
        main(arguments(run, evaluated, *SETTINGS, *more))


def test_weights_that_have_changed_do_not_mix_with_what_is_there(run, evaluated):
    weights = run[0] / "qwen" / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    try:
        with pytest.raises(ValueError, match=r"made in another way \(weights: "):
            main(arguments(run, evaluated, *SETTINGS))
    finally:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_checkpoint_greedily(run, tmp_path):
    main(
        [
            "--run",
            f"{run[0]}/checkpoint-1",
            "--benchmarks",
            "conv",
            "--output-dir",
            str(tmp_path),
            "--limit",
            "8",
            "--temperature",
            "0",
        ]
    )
    assert [(r["model"], r["metric"]) for r in results(tmp_path)["results"]] == [
        ("checkpoint-1/llama", "avg@1"),
        ("checkpoint-1/qwen", "avg@1"),
    ]
    table = completions(tmp_path, "checkpoint-1-qwen")
    policy, tokenizer = run[1].agents["qwen"].policy.eval(), tiny.tokenizer("qwen")
    for prompt, completion in zip(table["prompt"], table["completion"], strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        output = policy.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=1, pad_token_id=0)
        assert completion == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_agents_are_prompted_as_they_were_trained(run):
    """Template and its arguments come back from the checkpoint, so that the ids are those of training."""
    prompt = [{"role": "user", "content": "1+1=?"}]
    args = parse_args(["--run", str(run[0]), "--benchmarks", "conv"])
    task = tasks.load_task("conv", args)
    found = models.find_models([], args.run, Console())
    rendered = {
        m.label: models.make_agent(m, *models.describe(m, args), task, args).encode_prompt(prompt) for m in found
    }
    trained = {f"{run[0].name}/{name}": agent.encode_prompt(prompt) for name, agent in run[1].agents.items()}
    assert rendered == trained
    assert tiny.tokenizer("qwen").decode(rendered[f"{run[0].name}/qwen"]) == "~1+1=?"
    # Whoever loads the tokenizer has the template; the caller's own tokenizer stays as it was.
    assert AutoTokenizer.from_pretrained(run[0] / "llama").chat_template == PLAIN_TEMPLATE
    assert run[1].agents["llama"].tokenizer.chat_template is None


def test_math_problems_of_a_file(run, tmp_path, caplog):
    """A real reward, chat templates, and a problem that is too long for the agents' context of 4,096 tokens."""
    problems = tmp_path / "mine.jsonl"
    rows = [
        {"question": "1+1=?", "final": 2},
        {"question": "x" * 4096, "final": 3},
        {"question": "1+2=?", "final": ["3"]},
    ]
    problems.write_text("\n".join(map(json.dumps, rows)))
    more = ["--benchmarks", str(problems), "--columns", "problem=question,answer=final"]
    more += ["--metrics", "pass@2", "maj@2", "--max-completion-length", "8", "--output-dir", str(tmp_path / "out")]
    main(["--models", str(run[0] / "qwen"), str(run[0] / "llama"), *more])
    assert "1 of 3 prompts of mine are too long and left out for all agents" in caplog.text
    found = results(tmp_path / "out")["results"]
    assert [(r["metric"], r["value"], r["problems"]) for r in found] == [("pass@2", 0.0, 2), ("maj@2", 0.0, 2)] * 2
    shard = next((tmp_path / "out").rglob("batch-*.parquet"))
    table = pd.read_parquet(shard)
    assert len(table) == 4 and list(table["gold"]) == ['["2"]', '["2"]', '["3"]', '["3"]']


def test_an_adapter(run, tmp_path):
    """An adapter's folder has no weights of its own; it answers as the merged model does."""
    base = AutoModelForCausalLM.from_pretrained(run[0] / "qwen")
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    folder = tmp_path / "lora" / "qwen"
    adapted.save_pretrained(folder)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    tiny.tokenizer("qwen").save_pretrained(tmp_path / "merged")
    more = ["--benchmarks", "conv", "--limit", "16", "--temperature", "0"]
    main(["--run", str(tmp_path / "lora"), *more, "--output-dir", str(tmp_path / "a")])
    main(["--models", str(tmp_path / "merged"), str(run[0] / "qwen"), *more, "--output-dir", str(tmp_path / "b")])
    merged = next(tmp_path.glob("b/completions/*merged/conv/batch-*.parquet"))
    plain = next(tmp_path.glob("b/completions/*qwen/conv/batch-*.parquet"))
    adapter = next(tmp_path.glob("a/completions/lora-qwen/conv/batch-*.parquet"))
    answers = [list(pd.read_parquet(path)["completion"]) for path in (adapter, merged, plain)]
    assert answers[0] == answers[1] != answers[2]


def test_problems_without_a_readable_answer_do_not_count(tmp_path, monkeypatch, run):
    def judge(texts, golds):
        return [None if gold.startswith("3") else 1.0 for gold in golds], list(texts)

    monkeypatch.setattr(tasks, "judge_conv", judge)
    main(arguments(run, tmp_path, "--limit", "40"))
    golds = tasks.conv_dataset("test", 40)["answer"]
    unreadable = sum(gold.startswith("3") for gold in golds)
    row = results(tmp_path)["results"][0]
    assert (row["value"], row["problems"], row["skipped"]) == (1.0, 40 - unreadable, unreadable) and unreadable
    assert f"{unreadable} problems without a readable answer" in (tmp_path / "results.md").read_text()


# ---- what cannot work says so --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--benchmarks", "conv"), "There is nothing to evaluate"),
        (("--run", "nowhere", "--benchmarks", "conv"), "--run nowhere: there is no such folder"),
        (("--models", "embedded:gemma", "--benchmarks", "conv"), "no policy 'gemma'"),
    ],
)
def test_wrong_models_are_errors(more, message):
    with pytest.raises(ValueError, match=message):
        main(more)


def test_models_that_would_share_a_folder_are_an_error(run):
    path = str(run[0] / "qwen")
    with pytest.raises(ValueError, match="would share a folder of completions"):
        main(["--models", path, f"{path}/", "--benchmarks", "conv"])


def test_a_folder_without_agents_names_its_checkpoints(tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(ValueError, match=r"holds no agent.*Name one of its checkpoints: checkpoint-20\."):
        models.agent_folders(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperature", "0", "--num-samples", "4"), "--temperature 0 gives the same answer every time"),
        (("--metrics", "pass@8", "--num-samples", "4"), "conv: pass@8 of 4 samples a problem. Give --num-samples 8"),
        (("--temperature", "0", "--metrics", "maj@4"), "conv: maj@4 of 1 samples"),
    ],
)
def test_wrong_numbers_of_samples_are_errors(run, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        main(arguments(run, tmp_path, *more))
    assert not list(tmp_path.iterdir())


def problems_of(source):
    return tasks.conv_dataset("test", 2).remove_columns("source").add_column("source", [source] * 2)


def test_the_defaults_are_the_papers(monkeypatch):
    """Seven benchmarks: best@30 of answers up to 8192 tokens on AIME 2025, avg@1 up to 4096 elsewhere."""
    monkeypatch.setattr(tasks, "load_problems", lambda name, **kwargs: problems_of(name))
    args = parse_args([])
    loaded = {name: tasks.load_task(name, args) for name in args.benchmarks}
    assert len(loaded) == 7
    for name, task in loaded.items():
        settings = (task.max_completion_length, task.num_samples, str(task.metrics[0]))
        assert settings == ((8192, 30, "best@30") if name == "aime25" else (4096, 1, "avg@1"))


def test_an_id_of_a_benchmark_has_its_settings_and_a_file_has_not(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "load_problems", lambda name, **kwargs: problems_of("aime25"))
    by_id, file = (tasks.load_task(name, parse_args([])) for name in ("math-ai/aime25", "some/aime25.jsonl"))
    assert (by_id.name, by_id.num_samples) == ("aime25", 30) and (file.name, file.num_samples) == ("aime25", 1)


# ---- vLLM ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def fake_vllm(monkeypatch):
    """A `vllm` module that records what it was asked, and answers "3,8,7" and then, after the end, nonsense."""
    asked = types.SimpleNamespace(engines=[], calls=[])

    class SamplingParams:
        def __init__(self, **kwargs):
            self.__dict__.update(kwargs)

    class LLM:
        def __init__(self, **kwargs):
            asked.engines.append(kwargs)

        def generate(self, prompts, sampling_params, use_tqdm, lora_request):
            asked.calls.append((prompts, sampling_params, lora_request))
            ids = [*tiny.tokenizer("qwen")("3,8,7").input_ids, 1]
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)]) for _ in prompts]

    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda *args: args
    for name, module in {
        "vllm": vllm,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": request,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_vllm_gets_token_ids_and_every_sampling_parameter(run, tmp_path, fake_vllm):
    more = ["--benchmarks", "conv", "--limit", "3", "--num-samples", "2", "--temperature", "0.5", "--top-p", "0.9"]
    more += ["--backend", "vllm", "--tensor-parallel-size", "2", "--output-dir", str(tmp_path)]
    main(["--models", str(run[0] / "qwen"), *more])
    (engine,) = fake_vllm.engines
    assert engine["model"] == engine["tokenizer"] == str(run[0] / "qwen")
    # Prompts of 4 tokens and answers of 8; nothing is filled in from the model's generation_config.
    assert (engine["max_model_len"], engine["generation_config"], engine["tensor_parallel_size"]) == (12, "vllm", 2)
    ((prompts, parameters, lora_request),) = fake_vllm.calls
    assert lora_request is None
    problems = tasks.conv_dataset("test", 3)["prompt"]
    expected = [{"prompt_token_ids": tiny.tokenizer("qwen")(text).input_ids} for text in problems for _ in range(2)]
    assert prompts == expected
    settings = [{name: value for name, value in vars(p).items() if name != "seed"} for p in parameters]
    assert (
        settings
        == [
            {
                "n": 1,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": 8,
                "stop_token_ids": [1],
                "detokenize": False,
            }
        ]
        * 6
    )
    assert len({p.seed for p in parameters}) == 6
    table = pd.read_parquet(next(tmp_path.rglob("batch-*.parquet")))
    assert set(table["completion"]) == {"3,8,7"} and set(table["finish_reason"]) == {"stop"}


def test_vllm_greedy_with_an_adapter(run, tmp_path, fake_vllm):
    base = AutoModelForCausalLM.from_pretrained(run[0] / "qwen")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4)).save_pretrained(tmp_path / "adapter")
    more = ["--benchmarks", "conv", "--limit", "1", "--temperature", "0", "--output-dir", str(tmp_path / "out")]
    main(["--models", str(tmp_path / "adapter"), "--backend", "vllm", *more])
    (engine,) = fake_vllm.engines
    assert engine["model"] == engine["tokenizer"] == str(run[0] / "qwen")
    assert (engine["enable_lora"], engine["max_lora_rank"]) == (True, 4)
    ((_, (parameters,), lora_request),) = fake_vllm.calls
    assert parameters.temperature == 0.0 and lora_request == ("adapter", 1, str(tmp_path / "adapter"))


def test_without_vllm_the_error_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'hacpo_trl\[vllm\]'"):
        main(arguments(run, tmp_path, "--backend", "vllm", "--limit", "1"))


# ---- an interruption -----------------------------------------------------------------------------------------------
def test_an_interrupted_evaluation_says_how_to_continue(run, tmp_path, monkeypatch, capsys):
    def interrupt(self, requests):
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersGeneration, "generate", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(arguments(run, tmp_path, "--limit", "1"))
    assert exit_.value.code == 130 and "The same command continues." in capsys.readouterr().out


def test_a_report_in_python(run, tmp_path):
    """The command without its printing."""
    args, console = parse_args(arguments(run, tmp_path, "--limit", "2")), Console(quiet=True)
    report = evaluate(prepare(args, console), args, console)
    assert [outcome.benchmark for outcome in report.outcomes] == ["conv", "conv"]
    assert all(outcome.num_samples == 1 for outcome in report.outcomes)
