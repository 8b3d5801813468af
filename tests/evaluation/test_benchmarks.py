import json
import logging
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from hacpo_trl.commands.tasks import load_task
from hacpo_trl.commands.train_options import ScriptArguments
from hacpo_trl.evaluation import benchmarks
from hacpo_trl.evaluation.benchmarks import (
    BENCHMARKS,
    extract_answer,
    filter_long_prompts,
    load_problems,
    parse_columns,
)
from hacpo_trl.rewards import math_reward


# A row of each benchmark as the Hub has it, and the answer in it.
HUB_ROWS = {
    "math_train": (
        {
            "problem": "Compute $1/2$.",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"First \boxed{7}, no: \boxed{\frac{1}{2}}.",
        },
        r"\frac{1}{2}",
    ),
    "math_test": (
        {
            "problem": "Which?",
            "level": "Level 5",
            "type": "Geometry",
            "solution": r"So $A=\{1,2\}$: $\boxed{\{1,2\}}$.",
        },
        r"\{1,2\}",
    ),
    "math500": (
        {
            "problem": "Half?",
            "solution": r"It is $\boxed{\frac12}$.",
            "answer": r"\frac{1}{2}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        r"\frac{1}{2}",
    ),
    "gsm8k_train": ({"question": "How many?", "answer": "Twice 24 is <<2*24=48>>48.\n#### 48"}, "48"),
    "gsm8k_test": ({"question": "How much?", "answer": "In all <<30*36=1080>>1080.\n#### 1,080"}, "1,080"),
    "aime25": ({"problem": "Find the sum.", "answer": "70", "id": "0"}, "70"),
    "amc23": ({"id": 0, "answer": 27.0, "url": "https://example.org", "question": "Where do they meet?"}, "27"),
    "minerva": ({"question": "The luminosity?", "answer": "4.5e33"}, "4.5e33"),
    "olympiad": (
        {
            "id": 1606,
            "question": "Solve for $x$.",
            "solution": ["The roots are ..."],
            "final_answer": ["$2$", "$3$"],
            "is_multiple_answer": True,
            "answer_type": "Numerical",
        },
        "$2$, $3$",
    ),
}


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub: rows for every dataset, and a list of what was asked for."""
    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(load_dataset.rows)

    load_dataset.rows, load_dataset.asked = [], asked
    monkeypatch.setattr(benchmarks.datasets, "load_dataset", load_dataset)
    return load_dataset


# ---- benchmarks ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_read_from_a_row_of_the_hub(hub, name):
    row, answer = HUB_ROWS[name]
    hub.rows = [row]
    dataset = load_problems(name)
    spec = BENCHMARKS[name]
    assert hub.asked == [(spec.hub_id, spec.config, spec.split)]
    problem = row.get("problem") or row["question"]
    text = f"{problem}\n\nLet's think step by step and output the final answer within \\boxed{{}}."
    assert dataset[:] == {
        "prompt": [[{"role": "user", "content": text}]],
        "answer": [answer],
        "source": [name],
    }
    # What stands in the answer is what the reward compares with.
    assert math_reward([f"\\boxed{{{answer}}}", "\\boxed{98765}"], answer=[answer] * 2) == [1.0, 0.0]


def test_all_of_olympiad_benchs_final_answers_are_asked_for(hub):
    hub.rows = [HUB_ROWS["olympiad"][0]]
    gold = load_problems("olympiad")["answer"][0]
    completions = [r"\boxed{3, 2}", r"\boxed{2}", r"\boxed{2,3,4}"]
    assert math_reward(completions, answer=[gold] * 3) == [1.0, 0.0, 0.0]


def test_the_papers_settings():
    assert {name: (b.metric, b.num_samples, b.max_completion_length) for name, b in BENCHMARKS.items()} == {
        **dict.fromkeys(BENCHMARKS, ("avg", 1, 4096)),
        "aime25": ("best", 30, 8192),
    }


def test_a_benchmark_by_its_id_and_split(hub):
    hub.rows = [HUB_ROWS["gsm8k_test"][0]]
    assert load_problems("openai/gsm8k", split="test")["source"] == ["gsm8k_test"]
    assert load_problems("openai/gsm8k")["source"] == ["gsm8k_train"]
    assert hub.asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]


def test_another_dataset_of_the_hub(hub):
    hub.rows = [{"q": "One?", "a": "1"}]
    dataset = load_problems("some/dataset", split="validation", config="hard", columns={"problem": "q", "answer": "a"})
    assert dataset["answer"] == ["1"] and dataset["source"] == ["some/dataset"]
    assert hub.asked == [("some/dataset", "hard", "validation")]


def test_a_missing_column_names_those_there_are(hub):
    hub.rows = [{"question": "Find the sum.", "final": "70"}]
    with pytest.raises(ValueError, match=r"math-ai/aime25 \(test\) lacks the column 'problem' and 'answer'; it has "):
        load_problems("aime25")
    with pytest.raises(ValueError, match=r"\['final', 'question'\]"):
        load_problems("aime25", columns="problem=question")
    assert load_problems("aime25", columns="problem=question,answer=final")["answer"] == ["70"]


def test_unknown_names_and_mappings_are_errors():
    with pytest.raises(ValueError, match=r"'aime24' is no benchmark.*math500, gsm8k_train"):
        load_problems("aime24")
    with pytest.raises(ValueError, match="has its own split"):
        load_problems("math500", split="train")
    with pytest.raises(ValueError, match=r"There is no file nowhere\.jsonl"):
        load_problems("nowhere.jsonl")
    with pytest.raises(ValueError, match="must read like"):
        parse_columns("question")
    with pytest.raises(ValueError, match=r"columns maps \['solution'\]"):
        parse_columns("solution=answer")


# ---- answers in cells ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cell", "form", "answer"),
    [
        ("6", "column", "6"),
        (6, "column", "6"),
        (0.5, "column", "0.5"),
        (27.0, "column", "27"),
        (None, "column", None),
        (float("nan"), "column", None),
        ("  ", "column", None),
        (["1/2", "0.5"], "column", ["1/2", "0.5"]),
        ([], "column", None),
        ("no box", "boxed", None),
        (r"\boxed{", "boxed", None),
        (r"\boxed{}", "boxed", None),
        (r"\boxed 5", "boxed", "5"),
        ("no hashes: 5", "hashes", None),
        ("#### 5\n#### -6 ", "hashes", "-6"),
        (["$1$"], "finals", "$1$"),
        (["(1, 2)", None, "(3, 4)"], "finals", "(1, 2), (3, 4)"),
        ("7", "finals", "7"),
    ],
)
def test_extract_answer(cell, form, answer):
    assert extract_answer(cell, form) == answer


# ---- local files ---------------------------------------------------------------------------------------------------
def write_jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


def test_local_jsonl_with_a_mapping(tmp_path, caplog):
    rows = [{"q": "One?", "final": 1}, {"q": "None?", "final": ""}, {"q": "Two?", "final": 2}, {"q": "3?", "final": 3}]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    dataset = load_problems(path, columns="problem=q, answer=final", max_rows=2, plain=True)
    assert dataset["answer"] == ["1", "2"] and dataset["source"] == ["mine"] * 2
    assert dataset["prompt"][0].startswith("One?\n\nLet's think")
    assert "1 problems have no answer in 'final'" in caplog.text
    with pytest.raises(
        ValueError, match=r"mine.jsonl lacks the column 'problem' and 'answer'; it has \['final', 'q'\]"
    ):
        load_problems(path)
    with pytest.raises(ValueError, match="has no split"):
        load_problems(path, split="train")


def test_a_column_missing_further_down_names_its_row(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"problem": "One?", "answer": 1}, {"problem": "Two?"}])
    with pytest.raises(ValueError, match=r"lacks the column 'answer' in row 1; it has \['problem'\]"):
        load_problems(path)


def test_a_file_without_answers_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"problem": "One?", "answer": ""}])
    with pytest.raises(ValueError, match="has no problem with an answer in the column 'answer'"):
        load_problems(path)


def test_a_file_with_a_byte_order_mark_and_foreign_line_ends(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"problem": "One\xe2\x80\xa8?", "answer": 1}\r\n\r\n{"problem": "Two?", "answer": 2}'
    )
    dataset = load_problems(str(path))
    assert dataset["answer"] == ["1", "2"] and "One\u2028?" in dataset["prompt"][0][0]["content"]


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (b'{"problem": "Two?", "answ', "mine.jsonl, line 3, column 21: Unterminated string"),
        (b'{"problem": "Two?" "answer": 2}', "mine.jsonl, line 3, column 20: Expecting ',' delimiter"),
        (b'{"problem": "\xff", "answer": 2}', "mine.jsonl, line 3 is not UTF-8"),
        (b"[1]", r"mine.jsonl, line 3: a row must be an object with columns, not \[1\]"),
        (b'{"problem": 5, "answer": 2}', "'problem' of row 1 must be a text, not 5"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, third, message):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"problem": "One?", "answer": 1}\n\n' + third + b"\n")
    with pytest.raises(ValueError, match=message):
        load_problems(str(path))


def test_rows_without_a_problem_are_left_out(tmp_path, caplog):
    rows = [{"problem": None, "answer": 1}, {"problem": "", "answer": 1}, {"problem": "Two?", "answer": 2}]
    assert load_problems(write_jsonl(tmp_path / "mine.jsonl", rows))["answer"] == ["2"]
    assert "2 rows have no problem in 'problem' and are left out" in caplog.text


def test_a_parquet_file_that_is_cut_is_named(tmp_path):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"problem": ["One?"], "answer": ["1"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"mine\.parquet is no parquet file, or not all of one"):
        load_problems(str(path))


def test_local_parquet_with_alternatives(tmp_path):
    table = pa.table({"problem": ["Half?", "One?"], "answer": [["1/2", "50 \\text{ of } 100"], ["1"]]})
    pq.write_table(table, tmp_path / "mine.parquet")
    dataset = load_problems(str(tmp_path / "mine.parquet"))
    assert dataset["answer"] == [["1/2", "50 \\text{ of } 100"], ["1"]]
    assert math_reward([r"\boxed{0.5}", r"\boxed{1}"], answer=dataset["answer"]) == [1.0, 1.0]


def test_rows_with_and_without_alternatives_share_a_column(tmp_path):
    rows = [{"problem": "Half?", "answer": ["1/2", "0.5"]}, {"problem": "One?", "answer": 1}]
    assert load_problems(write_jsonl(tmp_path / "mine.jsonl", rows))["answer"] == [["1/2", "0.5"], ["1"]]


def test_worked_solutions_in_a_local_file(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"problem": "One?", "solution": r"It is $\boxed{1}$."}])
    assert load_problems(path, columns="answer=solution", answer_form="boxed")["answer"] == ["1"]


# ---- the task 'math' of `hacpo train` ----------------------------------------------------------------------------
def test_training_on_a_file_and_evaluating_on_a_benchmark(hub, tmp_path):
    hub.rows = [HUB_ROWS["math500"][0]] * 3
    path = write_jsonl(tmp_path / "mine.jsonl", [{"q": "One?", "final": 1}] * 4)
    arguments = {"task": "math", "dataset_name": path, "dataset_columns": "problem=q,answer=final", "test_size": 2}
    both = ScriptArguments(test_dataset_name=["math500", path], **arguments)
    train, test, reward = load_task(both, None)
    assert (len(train), len(test), reward) == (4, 4, math_reward)
    assert set(train["source"]) == {"mine"} and list(test["source"]) == ["math500"] * 2 + ["mine"] * 2
    with pytest.raises(ValueError, match="needs held-out problems: test_dataset_name"):
        load_task(ScriptArguments(**arguments), None)


# ---- prompts that are too long ---------------------------------------------------------------------------------
class Reader:
    def __init__(self, tokens_per_character: int, limit: int):
        self.tokens_per_character, self.max_prompt_length = tokens_per_character, limit

    def encode_prompt(self, prompt):
        return [0] * (self.tokens_per_character * len(prompt))


def test_prompts_too_long_for_any_agent_are_left_out_for_all(caplog):
    dataset = datasets.Dataset.from_dict({"prompt": ["a" * n for n in (5, 12, 1, 10, 11)], "answer": list("12345")})
    agents = {"qwen": Reader(1, 11), "llama": Reader(2, 20)}
    with caplog.at_level(logging.WARNING):
        kept = filter_long_prompts(dataset, agents, "train_dataset")
    assert kept["answer"] == ["1", "3", "4"]
    assert (
        "2 of 5 prompts of train_dataset are too long and left out for all agents: 1 for 'qwen' (limit 11 tokens), "
        "2 for 'llama' (limit 20 tokens)." in caplog.text
    )


def test_nothing_is_said_where_every_prompt_fits(caplog):
    dataset = datasets.Dataset.from_dict({"prompt": ["aa"]})
    assert filter_long_prompts(dataset, {"qwen": Reader(1, 2)}) is dataset and not caplog.text
    with pytest.raises(ValueError, match=r"Every prompt of the dataset is too long: 1 for 'qwen' \(limit 1 tokens\)"):
        filter_long_prompts(dataset, {"qwen": Reader(1, 1)})


def test_the_trainer_leaves_long_prompts_out(tmp_path, caplog):
    """A context of 128 tokens less an answer of 8: a prompt of 120 bytes fits, one of 121 does not."""
    prompts = datasets.Dataset.from_dict({"prompt": ["a" * n for n in (120, 121, 4, 200, 3, 2)], "answer": ["1"] * 6})
    agents = [{"name": "qwen", "max_model_length": 128}, {"name": "llama"}]
    trainer = tiny.trainer(tmp_path, prompts=prompts, agents=agents, eval_dataset={"held out": prompts})
    assert list(map(len, trainer.train_dataset["prompt"])) == [120, 4, 3, 2]
    assert list(map(len, trainer.eval_dataset["held out"]["prompt"])) == [120, 4, 3, 2]
    assert "2 of 6 prompts of train_dataset" in caplog.text and "eval_dataset['held out']" in caplog.text


# ---- procedural tasks --------------------------------------------------------------------------------------------
def test_reasoning_gym_has_problems_and_their_verifier():
    pytest.importorskip("reasoning_gym")
    dataset = benchmarks.reasoning_gym_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
    again = benchmarks.reasoning_gym_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
    other = benchmarks.reasoning_gym_dataset("chain_sum", size=5, seed=4, min_terms=2, max_terms=2)
    assert dataset[:] == again[:] and dataset["prompt"] != other["prompt"]
    assert set(dataset["source"]) == {"reasoning_gym/chain_sum"}
    right = [f"So it is <answer>0</answer>, no, <answer> {answer} </answer>." for answer in dataset["answer"]]
    wrong = [f"<answer>{int(answer) + 1}</answer>" for answer in dataset["answer"]]
    bare = list(dataset["answer"])
    score = benchmarks.reasoning_gym_reward
    assert score(right, entry=dataset["entry"]) == [1.0] * 5
    assert max(score(wrong, entry=dataset["entry"])) < 1 and score(bare, entry=dataset["entry"]) == [0.0] * 5
    # Conversations are judged by their last message, as in training.
    conversations = [[{"role": "assistant", "content": text}] for text in right]
    assert score(conversations, entry=dataset["entry"]) == [1.0] * 5


def test_a_verifier_that_takes_more_than_one_answer():
    """The puzzle has several solutions; the text of one of them is not what decides."""
    pytest.importorskip("reasoning_gym")
    dataset = benchmarks.reasoning_gym_dataset("countdown", size=2, seed=0, plain=True)
    completions = [f"<answer>({answer})</answer>" for answer in dataset["answer"]]
    assert benchmarks.reasoning_gym_reward(completions, entry=dataset["entry"]) == [1.0, 1.0]


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'hacpo_trl\[reasoning-gym\]'"):
        benchmarks.reasoning_gym_dataset("leg_counting", size=1)
