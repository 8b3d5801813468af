"""One model on one task: its samples in batches, each a parquet file that is there complete or not at all."""

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..agent import Agent
from ..generation.backend import GenerationBackend, GenerationRequest
from ..rewards.math import completion_text
from .metrics import group_equal_answers
from .models import Model
from .report import Outcome
from .tasks import Task


logger = logging.getLogger(__name__)

# The packages whose versions a verdict is good for.
JUDGES = ("hacpo_trl", "math-verify")
# Readers of a folder of parquet files pass over names that begin with an underscore.
SETTINGS_FILE = "_settings.json"

SHARD_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("benchmark", pa.string()),
        ("problem", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("gold", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Job:
    """One model on one task: batches of samples, each written to a file of its own.

    Attributes:
        model: The model.
        task: The task.
        agent: The model as an agent.
        folder: Where the batches go.
        batch_size: Samples of a batch.
        seed: The evaluation's seed.
    """

    model: Model
    task: Task
    agent: Agent
    folder: Path
    batch_size: int
    seed: int

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.task.problems) * self.task.num_samples

    def batches(self) -> dict[Path, range]:
        """For each batch its file and its samples; all samples of a problem follow one another."""
        starts = range(0, len(self), self.batch_size)
        return {
            self.folder / f"batch-{number:05d}.parquet": range(start, min(start + self.batch_size, len(self)))
            for number, start in enumerate(starts)
        }

    def missing(self) -> dict[Path, range]:
        """The batches that are not there yet, or are there in parts; the latter are said and made anew."""
        return {path: samples for path, samples in self.batches().items() if not _is_whole(path, len(samples))}

    def open(self, settings: Mapping[str, Any]):
        """Makes the folder; answers that are there, made with the same settings, get this version's verdicts.

        Raises:
            ValueError: The folder has answers that were made in another way.
        """
        path = self.folder / SETTINGS_FILE
        problems = json.dumps(self.task.problems.to_dict())
        settings = {
            **settings,
            "weights": self.model.weights(),
            "problems": hashlib.sha256(problems.encode()).hexdigest()[:16],
            "num_samples": self.task.num_samples,
            "max_completion_length": self.task.max_completion_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        judged_by = {name: importlib.metadata.version(name) for name in JUDGES}
        if path.is_file():
            try:
                found = json.loads(path.read_text())
                judged_before = found.pop("judged_by", None)
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path} cannot be read ({error}). Remove {self.folder} to begin anew.") from error
            different = {
                n: (found.get(n), settings.get(n)) for n in {**found, **settings} if found.get(n) != settings.get(n)
            }
            if different:
                details = "; ".join(
                    f"{name}: {old!r:.60} there, {new!r:.60} now" for name, (old, new) in different.items()
                )
                raise ValueError(
                    f"{self.folder} holds completions of '{self.model.label}' made in another way ({details}). Use "
                    "another --output-dir, or remove that folder."
                )
            if judged_before == judged_by:
                return
            self._judge_anew(judged_before)
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**settings, "judged_by": judged_by}, indent=2)
        _write_whole(path, lambda temporary: temporary.write_text(text))

    def _judge_anew(self, judged_before: Mapping[str, str] | None):
        """Verdicts of other versions say nothing about this one's; the answers themselves can stay."""
        there = {path: samples for path, samples in self.batches().items() if path not in self.missing()}
        by = " and ".join(f"{name} {version}" for name, version in (judged_before or {}).items())
        logger.warning(f"{self.folder}: the answers were judged by {by or 'another version'}, and are judged anew.")
        for path, samples in there.items():
            table = _read(path)
            golds = [self.task.problems[sample // self.task.num_samples]["answer"] for sample in samples]
            rewards, answers = self.task.judge(table["completion"].to_pylist(), golds)
            for name, values in (("answer", answers), ("reward", rewards)):
                field = SHARD_SCHEMA.field(name)
                table = table.set_column(SHARD_SCHEMA.get_field_index(name), field, pa.array(values, field.type))
            _write_table(path, table)

    def run(self, path: Path, samples: range, backend: GenerationBackend):
        """Samples, judges and writes one batch."""
        key = f"{self.seed}/{self.model.label}/{self.task.name}/{path.stem}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
        problems = [self.task.problems[sample // self.task.num_samples] for sample in samples]
        request = GenerationRequest(self.agent.render([p["prompt"] for p in problems]), 1, seed)
        completions = backend.generate({self.agent.name: request})[self.agent.name]
        texts = [self.agent.decode(completion.ids)[0] for completion in completions]
        rewards, answers = self.task.judge(texts, [problem["answer"] for problem in problems])
        rows = [
            {
                "model": self.model.label,
                "benchmark": self.task.name,
                "problem": sample // self.task.num_samples,
                "sample": sample % self.task.num_samples,
                "prompt": completion_text(problem["prompt"]),
                "completion": text,
                "tokens": len(completion.ids),
                "finish_reason": completion.finish_reason,
                "gold": gold if isinstance(gold := problem["answer"], str) else json.dumps(gold, ensure_ascii=False),
                "answer": answer,
                "reward": reward,
            }
            for sample, problem, text, completion, answer, reward in zip(
                samples, problems, texts, completions, answers, rewards, strict=True
            )
        ]
        table = pa.Table.from_pylist(rows, schema=SHARD_SCHEMA)
        _write_table(path, table)

    def outcome(self) -> Outcome:
        """Metrics of all batches."""
        columns = ["problem", "sample", "tokens", "finish_reason", "answer", "reward"]
        rows = [row for path in self.batches() for row in _read(path, columns).to_pylist()]
        k = self.task.num_samples
        of_problem = [rows[start : start + k] for start in range(0, len(rows), k)]
        judged = [p for p, of in enumerate(of_problem) if all(row["reward"] is not None for row in of)]
        groups: Sequence[Sequence[int | None]] = [[None] * k for _ in judged]
        if any(metric.kind == "maj" for metric in self.task.metrics):
            answers = [[row["answer"] for row in of_problem[problem]] for problem in judged]
            groups = group_equal_answers(answers, self.task.equal)
        rewards = [[row["reward"] for row in of_problem[problem]] for problem in judged]
        return Outcome(
            model=self.model.label,
            benchmark=self.task.name,
            title=self.task.title,
            values={
                metric: {p: metric(r, g) for p, r, g in zip(judged, rewards, groups, strict=True)}
                for metric in self.task.metrics
            },
            num_samples=k,
            skipped=len(of_problem) - len(judged),
            mean_tokens=sum(row["tokens"] for row in rows) / len(rows),
            cut=sum(row["finish_reason"] == "length" for row in rows) / len(rows),
            max_completion_length=self.task.max_completion_length,
        )


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    return pq.read_table(path, columns=columns, page_checksum_verification=True)


def _is_whole(path: Path, size: int) -> bool:
    """Whether a batch of so many samples is there to be read."""
    if not path.is_file():
        return False
    try:
        if _read(path).num_rows == size:
            return True
        found = "has another number of answers"
    except (OSError, pa.ArrowException) as error:
        found = f"cannot be read ({error})"
    logger.warning(f"{path} {found}; its answers are sampled anew.")
    return False


def _write_table(path: Path, table: pa.Table):
    _write_whole(path, lambda temporary: pq.write_table(table, temporary, write_page_checksum=True))


def _write_whole(path: Path, write: Callable[[Path], Any]):
    """Writes a file such that it is there complete or not at all, whenever the process is killed."""
    temporary = path.with_name(f"_{path.name}.{os.getpid()}")
    write(temporary)
    temporary.rename(path)


def rewards_of(evaluation: Path, model: str, benchmark: str) -> dict[int, list[float]]:
    """For each problem that has verdicts, the rewards of a model's answers, out of an evaluation's folder."""
    of_model = [("model", "=", model), ("benchmark", "=", benchmark)]
    table = pq.read_table(evaluation / "completions", columns=["problem", "reward"], filters=of_model)
    rewards: dict[int, list[float]] = {}
    for row in table.to_pylist():
        if row["reward"] is not None:
            rewards.setdefault(row["problem"], []).append(row["reward"])
    return rewards
