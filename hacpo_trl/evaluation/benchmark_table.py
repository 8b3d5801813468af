"""The benchmarks by name: where they are, what their columns mean, and how the paper evaluates on them."""

from dataclasses import dataclass
from typing import Any, Literal


# The embedded tasks among the benchmarks of an evaluation, and their longest answers in tokens.
EMBEDDED_TASKS = {"conv": 8, "conv_words": 56}
# Those that the paper evaluates on.
PAPER_BENCHMARKS = ["math_test", "math500", "gsm8k_test", "aime25", "amc23", "minerva", "olympiad"]
LOCAL_FORMATS = (".jsonl", ".parquet")

AnswerForm = Literal["column", "boxed", "hashes", "finals"]


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is on the Hub, what its columns mean, and how the paper evaluates on it.

    Attributes:
        name: Its name here: in `--benchmarks`, and in the column `source`.
        title: Its name in tables.
        hub_id: Dataset on the Hub.
        split: Split of that dataset.
        config: Configuration of that dataset; None for its only one.
        problem: Column of the problem.
        answer: Column that holds the answer.
        answer_form: How: `"column"`, the cell is the answer; `"boxed"`, it is in the last `\\boxed{}` of the cell;
            `"hashes"`, it follows the last `####`; `"finals"`, the cell is a list of answers that are all asked for.
        max_completion_length: Longest answer in evaluation, in tokens.
        metric: What the paper reports; `"avg"` and one sample, or `"best"` and 30.
        num_samples: Samples of each problem for that metric.
    """

    name: str
    title: str
    hub_id: str
    split: str
    config: str | None = None
    problem: str = "problem"
    answer: str = "answer"
    answer_form: AnswerForm = "column"
    max_completion_length: int = 4096
    metric: Literal["avg", "best"] = "avg"
    num_samples: int = 1


_MATH: dict[str, Any] = {"hub_id": "DigitalLearningGmbH/MATH-lighteval", "answer": "solution", "answer_form": "boxed"}
_GSM8K: dict[str, Any] = {"hub_id": "openai/gsm8k", "config": "main", "problem": "question", "answer_form": "hashes"}

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("math_train", "MATH (train)", split="train", config="default", **_MATH),
        Benchmark("math_test", "MATH", split="test", config="default", **_MATH),
        Benchmark("math500", "MATH-500", "HuggingFaceH4/MATH-500", "test"),
        Benchmark("gsm8k_train", "GSM8K (train)", split="train", **_GSM8K),
        Benchmark("gsm8k_test", "GSM8K", split="test", **_GSM8K),
        Benchmark(
            "aime25",
            "AIME 2025",
            "math-ai/aime25",
            "test",
            max_completion_length=8192,
            metric="best",
            num_samples=30,
        ),
        Benchmark("amc23", "AMC 23", "math-ai/amc23", "test", problem="question"),
        Benchmark("minerva", "Minerva", "math-ai/minervamath", "test", problem="question"),
        Benchmark(
            "olympiad",
            "OlympiadBench",
            "Hothan/OlympiadBench",
            "train",
            config="OE_TO_maths_en_COMP",
            problem="question",
            answer="final_answer",
            answer_form="finals",
        ),
    )
}
