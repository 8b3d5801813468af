r"""Problems with verifiable answers: the benchmarks by name, any dataset of the Hub, local files, procedural tasks.

    load_problems("math_train")                                              a benchmark, from the Hub
    load_problems("openai/gsm8k", split="test")                              the same, by its id
    load_problems("some/dataset", columns="problem=question,answer=final")   another dataset of the Hub
    load_problems("problems.jsonl")                                          a local .jsonl or .parquet

Every dataset comes back with the same three columns, ready for `HACPOTrainer` and `hacpo_trl.rewards.math_reward`:
`prompt` (the paper's: think step by step, answer in `\boxed{}`), `answer` and `source`, the benchmark's name, by which
evaluations are split.

What differs between benchmarks is where the answer is (`benchmark_table.py`): MATH has it in the last `\boxed{}` of a
worked solution, GSM8K after `####`, OlympiadBench in a list of final answers. That list is no list of alternatives:
all of its members are asked for, so it becomes one answer, "2, 3". In a local file a list does mean alternatives, as
in `math_reward`.
"""

import codecs
import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow.parquet

from ..rewards.math import completion_text
from ..rewards.math_text import last_boxed
from ..rollouts.rollout import Prompt
from .benchmark_table import BENCHMARKS, LOCAL_FORMATS, AnswerForm, Benchmark


logger = logging.getLogger(__name__)

PROMPT = "{problem}\n\nLet's think step by step and output the final answer within \\boxed{{}}."


# ---- loading ------------------------------------------------------------------------------------------------------
def load_problems(
    source: str,
    split: str | None = None,
    config: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    answer_form: AnswerForm | None = None,
    max_rows: int | None = None,
    plain: bool = False,
) -> datasets.Dataset:
    r"""Problems of a benchmark, a dataset of the Hub or a local file.

    Args:
        source: A name in `BENCHMARKS`, a dataset id, or the path of a `.jsonl` or `.parquet` file.
        split: Split of a dataset on the Hub; a benchmark has its own, and other ids default to `"train"`.
        config: Configuration of a dataset on the Hub.
        columns: Which columns hold problem and answer where they are not called that: a mapping, or
            `"problem=question,answer=final"`. For a benchmark it replaces what is known of it.
        answer_form: How the answer's column holds it, see `Benchmark`.
        max_rows: So many problems at most, the first ones.
        plain: Prompts are plain texts instead of conversations of one user message.

    Returns:
        A dataset with the columns `prompt`, `answer` (a text, or in every row a list of alternatives) and `source`.
        Rows without an answer are left out, with a warning that counts them.

    Raises:
        ValueError: There is no such source, or it lacks a column; the message names those it has.
    """
    columns = parse_columns(columns)
    if Path(source).suffix in LOCAL_FORMATS:
        if split is not None or config is not None:
            raise ValueError(f"{source} is a local file: it has no split and no config. Leave them out.")
        name, where = Path(source).stem, source
        spec = Benchmark(name, name, hub_id=source, split="")
        rows = _read_local(Path(source))
    else:
        spec = _on_the_hub(source, split, config)
        name, where = spec.name, f"{spec.hub_id} ({spec.split})"
        rows = datasets.load_dataset(spec.hub_id, spec.config, split=spec.split)
    problem_column = columns.get("problem", spec.problem)
    answer_column = columns.get("answer", spec.answer)
    form = answer_form or ("column" if "answer" in columns else spec.answer_form)
    return _problems(rows, where, name, problem_column, answer_column, form, max_rows, plain)


def parse_columns(columns: str | Mapping[str, str] | None) -> dict[str, str]:
    """A column mapping as a dict; on the command line it is `problem=question,answer=final`."""
    if columns is None:
        return {}
    if isinstance(columns, str):
        pairs = [pair.partition("=") for pair in columns.split(",")]
        if any(not key.strip() or not value.strip() for key, _, value in pairs):
            raise ValueError(f"columns must read like 'problem=question,answer=final', not {columns!r}.")
        columns = {key.strip(): value.strip() for key, _, value in pairs}
    if unknown := sorted(set(columns) - {"problem", "answer"}):
        raise ValueError(f"columns maps {unknown}, but only 'problem' and 'answer' have a meaning.")
    return dict(columns)


def _on_the_hub(source: str, split: str | None, config: str | None) -> Benchmark:
    if source in BENCHMARKS:
        if split is not None or config is not None:
            raise ValueError(
                f"The benchmark {source!r} has its own split and config. Leave them out, or give the dataset's id, "
                f"{BENCHMARKS[source].hub_id!r}."
            )
        return BENCHMARKS[source]
    known = [b for b in BENCHMARKS.values() if b.hub_id == source and config in (None, b.config)]
    for benchmark in known:
        if split in (None, benchmark.split):
            return benchmark
    if "/" not in source:
        raise ValueError(
            f"{source!r} is no benchmark, no id of a dataset (owner/name) and no {' or '.join(LOCAL_FORMATS)} file. "
            f"The benchmarks are: {', '.join(BENCHMARKS)}."
        )
    return Benchmark(source, source, source, split or "train", config)


def _read_local(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is no parquet file, or not all of one: {error}") from error
    rows = []
    # Not `open`, which ends a line at a lone carriage return as well; a byte-order mark is not part of the first line.
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, column {error.colno}: {error.msg}.") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8: {error}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a row must be an object with columns, not {row!r:.40}.")
        rows.append(row)
    return rows


def _problems(
    rows: Iterable[dict[str, Any]],
    where: str,
    name: str,
    problem_column: str,
    answer_column: str,
    form: AnswerForm,
    max_rows: int | None,
    plain: bool,
) -> datasets.Dataset:
    prompts, answers, without_answer, without_problem = [], [], 0, 0
    for number, row in enumerate(rows):
        missing = [column for column in (problem_column, answer_column) if column not in row]
        if missing:
            raise ValueError(
                f"{where} lacks the column {' and '.join(map(repr, missing))}"
                + (f" in row {number}" if number else "")
                + f"; it has {sorted(row)}. Name the right ones: columns='problem=...,answer=...'."
            )
        answer, problem = extract_answer(row[answer_column], form), row[problem_column]
        if answer is None:
            without_answer += 1
            continue
        if problem is None or problem == "":
            without_problem += 1
            continue
        if not isinstance(problem, str):
            raise ValueError(f"{where}: {problem_column!r} of row {number} must be a text, not {problem!r:.60}.")
        text = PROMPT.format(problem=problem)
        prompts.append(text if plain else [{"role": "user", "content": text}])
        answers.append(answer)
        if len(prompts) == max_rows:
            break
    if without_answer:
        logger.warning(f"{where}: {without_answer} problems have no answer in {answer_column!r} and are left out.")
    if without_problem:
        logger.warning(f"{where}: {without_problem} rows have no problem in {problem_column!r} and are left out.")
    if not prompts:
        raise ValueError(f"{where} has no problem with an answer in the column {answer_column!r} ({form}).")
    if any(isinstance(answer, list) for answer in answers):
        # A column has one type.
        answers = [answer if isinstance(answer, list) else [answer] for answer in answers]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": answers, "source": [name] * len(prompts)})


def extract_answer(cell: Any, form: AnswerForm) -> str | list[str] | None:
    """The answer in a dataset's cell (see `Benchmark.answer_form`), None where there is none."""
    if form == "boxed":
        return _text(last_boxed(_text(cell) or ""))
    if form == "hashes":
        _, hashes, answer = (_text(cell) or "").rpartition("####")
        return _text(answer) if hashes else None
    if isinstance(cell, (list, tuple)):
        texts = [text for text in map(_text, cell) if text is not None]
        if form == "finals":
            return ", ".join(texts) or None
        return texts or None
    return _text(cell)


def _text(cell: Any) -> str | None:
    """A cell as text; a number that a table made a float of, such as 27.0, is the integer again."""
    if cell is None or cell != cell:
        return None
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell).strip() or None


# ---- prompts that are too long --------------------------------------------------------------------------------------
class PromptReader(Protocol):
    """What `filter_long_prompts` asks of an agent; `hacpo_trl.agent.Agent` is one."""

    @property
    def max_prompt_length(self) -> int:
        """The longest prompt that leaves room for an answer."""
        ...

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The prompt in the agent's tokens."""
        ...


def filter_long_prompts(
    dataset: datasets.Dataset, agents: Mapping[str, PromptReader], name: str = "the dataset"
) -> datasets.Dataset:
    """Leaves out the prompts that are too long for any of the agents, for all of them: they answer the same prompts.

    Args:
        dataset: A dataset with a column `prompt`.
        agents: The agents by name; each has a `max_prompt_length` in its own tokens.
        name: What to call the dataset in the warning that counts the prompts.

    Raises:
        ValueError: No prompt is short enough.
    """
    too_long = dict.fromkeys(agents, 0)
    kept = []
    for index, prompt in enumerate(dataset["prompt"]):
        fits = True
        for agent_name, agent in agents.items():
            try:
                length = len(agent.encode_prompt(prompt))
            except ValueError as error:
                raise ValueError(f"Row {index} of {name}: {error}") from error
            if length > agent.max_prompt_length:
                too_long[agent_name] += 1
                fits = False
        if fits:
            kept.append(index)
    if len(kept) == len(dataset):
        return dataset
    counts = ", ".join(
        f"{count} for '{agent_name}' (limit {agents[agent_name].max_prompt_length} tokens)"
        for agent_name, count in too_long.items()
        if count
    )
    if not kept:
        raise ValueError(
            f"Every prompt of {name} is too long: {counts}. Lower max_completion_length, or raise max_model_length."
        )
    logger.warning(
        f"{len(dataset) - len(kept)} of {len(dataset)} prompts of {name} are too long and left out for all agents: "
        f"{counts}."
    )
    return dataset.select(kept)


# ---- procedural tasks ----------------------------------------------------------------------------------------------
REASONING_GYM_PROMPT = (
    "{question}\n\nLet's think step by step and output the final answer between <answer> and </answer>."
)


def _reasoning_gym():
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "Procedural tasks need the package reasoning-gym: pip install 'hacpo_trl[reasoning-gym]'."
        ) from error
    return reasoning_gym


@functools.lru_cache(maxsize=64)
def _procedural_task(task: str, size: int, seed: int, config: str):
    return _reasoning_gym().create_dataset(task, size=size, seed=seed, **json.loads(config))


def reasoning_gym_dataset(task: str, size: int, seed: int = 0, plain: bool = False, **config) -> datasets.Dataset:
    """Problems of a procedural task of reasoning-gym, for `reasoning_gym_reward`.

    Args:
        task: Name of the task, such as `"chain_sum"`.
        size: Number of problems.
        seed: Seed of the problems.
        plain: Prompts are plain texts instead of conversations of one user message.
        config: Further settings of the task, such as its difficulty; they must survive JSON.

    Returns:
        A dataset with the columns `prompt`, `answer`, `source` (`"reasoning_gym/<task>"`) and `entry`, JSON from which
        the reward makes the problem again: a verifier may need more of it than its answer.
    """
    config_json = json.dumps(config, sort_keys=True)
    problems = _procedural_task(task, size, seed, config_json)
    texts = [REASONING_GYM_PROMPT.format(question=problem["question"]) for problem in problems]
    entry = {"task": task, "size": size, "seed": seed, "config": config_json}
    return datasets.Dataset.from_dict(
        {
            "prompt": texts if plain else [[{"role": "user", "content": text}] for text in texts],
            "answer": [_text(problem["answer"]) for problem in problems],
            "source": [f"reasoning_gym/{task}"] * size,
            "entry": [json.dumps({**entry, "index": index}) for index in range(size)],
        }
    )


def reasoning_gym_reward(completions: Sequence[str | list[dict]], entry: list[str], **kwargs) -> list[float]:
    """Reward function: what the task's own verifier gives the text between the last <answer> and </answer>.

    Verifiers give 1.0 for a right answer, 0.0 for none, and for others what the task says, often a little.
    """
    extract = _reasoning_gym().utils.extract_answer
    rewards = []
    for completion, problem in zip(completions, map(json.loads, entry), strict=True):
        index = problem.pop("index")
        task = _procedural_task(**problem)
        rewards.append(float(task.score_answer(extract(completion_text(completion)), task[index])))
    return rewards
