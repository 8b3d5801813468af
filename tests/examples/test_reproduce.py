"""`examples/reproduce.py`: its commands, what it reads from evaluations, the paper's numbers, and a small run."""

import csv
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reproduce
from rich.console import Console

from hacpo_trl.evaluation.jobs import SHARD_SCHEMA


ALONE = ("start", "grpo", "gspo", "gspo_x2")  # rows in which the other agent plays no part


def paper_rows() -> list[dict[str, str]]:
    with reproduce.PAPER_RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- the paper's numbers -------------------------------------------------------------------------------------------
def test_the_papers_tables_are_whole():
    rows = paper_rows()
    assert len(rows) == len({(row["pair"], row["agent"], row["method"]) for row in rows}) == 6 * 2 * 6
    for name, pair in reproduce.PAIRS.items():
        agents = [agent["name"] for agent in reproduce.agents_of(pair)]
        methods = reproduce.DEFAULT_METHODS if name != "tiny" else []
        assert set(reproduce.paper_results(name)) == {(agent, method) for agent in agents for method in methods}
        if name != "tiny":
            assert all(set(of) == set(pair.benchmarks) for of in reproduce.paper_results(name).values())


def test_models_that_learn_alone_have_the_same_numbers_in_every_pair():
    """As in the paper, but for one cell: AIME 2025 of Llama-3.2-1B-Instruct at the start, 0 or .033."""
    found, differing = {}, []
    for name, pair in reproduce.PAIRS.items():
        paper = reproduce.paper_results(name)
        for agent in reproduce.agents_of(pair) if paper else []:
            for method in ALONE:
                for benchmark, value in paper[agent["name"], method].items():
                    key = (agent["model_name_or_path"], method, benchmark)
                    if found.setdefault(key, value) != value:
                        differing.append((*key, found[key], value))
    assert differing == [("meta-llama/Llama-3.2-1B-Instruct", "start", "aime25", 0.0, 0.033)]


def test_ten_of_the_papers_averages_are_not_the_mean_of_their_row():
    off = {}
    for row in paper_rows():
        values = [float(row[name]) for name in reproduce.PAIRS[row["pair"]].benchmarks]
        if abs(difference := sum(values) / 7 - float(row["avg"])) > 6e-4:
            off[row["pair"], row["agent"], row["method"]] = difference
    assert len(off) == 10
    assert max(map(abs, off.values())) == pytest.approx(0.0113, abs=1e-4)
    hacpos = {key[:2]: difference for key, difference in off.items() if key[2] == "hacpo"}
    assert hacpos == {
        ("qwen3-4b+4b-instruct", "instruct"): pytest.approx(0.0053, abs=1e-4),
        ("qwen3-4b+8b", "small"): pytest.approx(-0.0113, abs=1e-4),
    }


# ---- commands ------------------------------------------------------------------------------------------------------
def test_commands_of_a_pair(tmp_path, capsys):
    arguments = ["--pair", "qwen3-4b+4b-instruct", "--methods", "start", "gspo_x2", "--print", "--backend", "vllm"]
    arguments += ["--output-dir", str(tmp_path), "--", "--report_to", "trackio"]
    reproduce.main(reproduce.parse_args(arguments))
    _, serve, *evaluations, train, greedy, sampled = capsys.readouterr().out.splitlines()
    folder = tmp_path / "qwen3-4b+4b-instruct"
    assert serve.startswith("python -m hacpo_trl.serve --config") and serve.endswith("servers &")
    assert len(evaluations) == 4
    first, _, third, _ = evaluations
    assert "--models Qwen/Qwen3-4B --chat-template-kwargs '{\"enable_thinking\": false}' --benchmarks math500" in first
    assert "--models Qwen/Qwen3-4B-Instruct-2507 --benchmarks math500 math_test gsm8k_test amc23" in third
    assert first.endswith(f"--temperature 0 --max-completion-length 8196 --output-dir {folder}/start/plain/greedy")
    assert train == (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 python -m accelerate.commands.launch --config_file configs/accelerate/zero3.yaml"
        f" --num_processes 4 examples/train_qwen_llama.py --config {folder}/gspo_x2/recipe.yaml --resume"
        " --report_to trackio"
    )
    assert f"--run {folder}/gspo_x2/run --benchmarks math500" in greedy
    assert "--benchmarks aime25 --backend vllm --max-completion-length 8196" in sampled


def test_training_leaves_the_servers_their_devices(tmp_path):
    args = reproduce.parse_args(["--pair", "qwen3-4b+8b", "--num-processes", "8", "--output-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="trains on devices 0 to 7, of which the recipe gives 4, 5, 6, 7 to vLLM"):
        reproduce.commands_of("gspo", args)


SERVER = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1], "stopped").touch()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], "up").touch()
time.sleep(100)
"""
# Ends with a status as soon as the server is up.
CLIENT = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "up").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_servers_run_as_long_as_training_does(tmp_path, status):
    servers = reproduce.Command(["-c", SERVER, str(tmp_path)])
    training = reproduce.Command(["-c", CLIENT, str(tmp_path), str(status)], beside=servers)
    with nullcontext() if status == 0 else pytest.raises(SystemExit, match="Exit status 3: python -c"):
        training.run()
    assert (tmp_path / "stopped").is_file()


def test_what_is_done_is_not_run_again(tmp_path):
    (tmp_path / "done").touch()
    reproduce.Command(["-c", "raise SystemExit(1)"], done=tmp_path / "done").run()


def test_a_run_with_other_settings_is_refused(tmp_path):
    arguments = ["--pair", "tiny", "--methods", "hacpo", "--output-dir", str(tmp_path)]
    args = reproduce.parse_args(arguments)
    reproduce.commands_of("hacpo", args)
    (args.output_dir / "hacpo" / "run").mkdir()
    reproduce.commands_of("hacpo", args)
    with pytest.raises(SystemExit, match=r"hacpo/run was trained with other settings, see .*hacpo/recipe.yaml"):
        reproduce.commands_of("hacpo", reproduce.parse_args([*arguments, "--", "--learning_rate", "1e-5"]))


# ---- results -------------------------------------------------------------------------------------------------------
def write_evaluation(folder, label: str, results: dict[str, tuple[str, float]], answers=()):
    folder.mkdir(parents=True)
    rows = [{"model": label, "benchmark": b, "metric": m, "value": v} for b, (m, v) in results.items()]
    # Further metrics of the same benchmark come behind the paper's.
    rows += [row | {"metric": "maj@30", "value": -1.0} for row in rows]
    (folder / "results.json").write_text(json.dumps({"results": rows}))
    for number, (benchmark, problem, reward) in enumerate(answers):
        path = folder / "completions" / "some-slug" / benchmark / f"batch-{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"model": label, "benchmark": benchmark, "problem": problem, "sample": 0, "tokens": 1, "reward": reward}
        pq.write_table(pa.Table.from_pylist([row], schema=SHARD_SCHEMA), path)


def test_the_table_has_ours_and_the_papers(tmp_path):
    methods = ["--methods", "start", "gspo", "gspo_x2", "hacpo_code"]
    args = reproduce.parse_args(["--pair", "qwen3-1.7b+4b", "--output-dir", str(tmp_path), *methods])
    others = [name for name in args.pair.benchmarks if name != "aime25"]
    # One problem with one of two answers right, one without any: with replacement the best of 2 is right in 3 of 4.
    answers = [("aime25", 0, 1.0), ("aime25", 0, 0.0), ("aime25", 1, 0.0), ("aime25", 1, 0.0), ("aime25", 2, None)]
    start = args.output_dir / "start" / "small"
    write_evaluation(start / "greedy", "Qwen/Qwen3-1.7B-Base", dict.fromkeys(others, ("avg@1", 0.5)))
    write_evaluation(start / "sampled", "Qwen/Qwen3-1.7B-Base", {"aime25": ("best@2", 0.5)}, answers)
    gspo = args.output_dir / "gspo"
    write_evaluation(gspo / "greedy", "run/small", {"math500": ("avg@1", 0.66)})

    header, *rows = [
        line.strip("| ").split(" | ") for line in reproduce.table_of("small", args).markdown().split("\n")
    ]
    assert header == [
        *("method", "MATH-500", "MATH", "GSM8K", "AMC 23", "Minerva", "OlympiadBench", "AIME 2025", "mean")
    ]
    _, at_start, with_gspo, with_gspo_x2, with_code = rows
    mean = (6 * 0.5 + 0.375) / 7
    # Table 1: .5 .483 .616 .033 .3 .206 .229, printed average .338.
    assert at_start == [
        *("start", "0.500 (0.500)", "0.500 (0.483)", "0.500 (0.616)", "0.500 (0.300)", "0.500 (0.206)"),
        *("0.500 (0.229)", "0.375 (0.033)", f"{mean:.3f} (0.338)"),
    ]
    assert with_gspo[:3] == ["gspo", "0.660 (0.648)", "– (0.641)"] and with_gspo[-1] == "– (0.467)"
    # The paper prints .475; the mean of the row is .465.
    assert with_gspo_x2[-1] == "– (0.465)"
    # The authors' variant of HACPO stands beside the paper's HACPO.
    assert with_code[:2] == ["hacpo_code", "– (0.690)"]

    console = Console(record=True, width=200)
    reproduce.present(args, console)
    printed = console.export_text()
    assert "In parentheses the paper's" in printed and "large: Qwen/Qwen3-4B-Base" in printed
    assert "| start | 0.500 (0.500) |" in (args.output_dir / "results.md").read_text()


def test_a_small_run_from_training_to_the_table(policies_folder, repository, tmp_path):
    """The embedded pair, one step: trains, evaluates, prints, and leaves what says that training is done."""
    environment = {**os.environ, "HACPO_TRL_CACHE": str(policies_folder), "COLUMNS": "120"}
    arguments = ["--pair", "tiny", "--limit", "16", "--methods", "start", "gspo", "--output-dir", str(tmp_path)]
    arguments += ["--", "--train_size", "16", "--test_size", "16"]
    command = [sys.executable, str(repository / "examples" / "reproduce.py"), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert "GSPO after 2 updates of each agent" in result.stdout
    note, title, table, *_ = (tmp_path / "tiny" / "results.md").read_text().split("\n\n")
    assert note == "`tiny`, the first 16 problems of each benchmark"
    header, _, start, gspo = table.splitlines()
    assert title == "qwen: embedded:qwen3-words" and header == "| method | conv_words | mean |"
    assert start.startswith("| start | 0.") and gspo.startswith("| gspo | 0.")

    train, evaluate = reproduce.commands_of("gspo", reproduce.parse_args(arguments))
    assert train.done.is_file() and evaluate.done is None
