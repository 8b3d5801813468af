"""Evaluates models, or every agent of a training run, on benchmarks.

    hacpo evaluate --run outputs/qwen3_4b_llama3_2_3b --benchmarks aime25 amc23 math500
    hacpo evaluate --models Qwen/Qwen3-4B-Base outputs/duo/qwen --benchmarks problems.jsonl --limit 50
    hacpo evaluate --models embedded:qwen3 embedded:llama --benchmarks conv

The default metrics are the paper's, best@30 on AIME 2025 and avg@1 elsewhere, with answers of up to 8192 and 4096
tokens at temperature 1. (`examples/reproduce.py` evaluates as the paper does, as far as that is known.)
Prompts, BOS, stop tokens and verdicts come from the code that training uses.

`--output-dir` gets results.json, results.md and, a parquet file for each batch, every completion with its extracted
answer and verdict: `completions/<model>/<benchmark>/`, which pandas reads as one table. A batch is written when it is
done, whole or not at all, and its seed depends on the model, the benchmark and its number alone. So the same command
continues an evaluation that was broken off, and ends with the same results.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..evaluation.benchmark_table import BENCHMARKS, EMBEDDED_TASKS, PAPER_BENCHMARKS
from ..evaluation.metrics import Metric
from .errors import CommandParser, user_errors
from .heavy import heavy_imports


# vLLM schedules requests itself and wants many at once; `generate` pads a batch to its longest prompt.
DEFAULT_BATCH_SIZE = {"transformers": 32, "vllm": 1024}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="hacpo evaluate", description=__doc__.split("\n")[0])
    what = parser.add_argument_group("what")
    what.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="ids, folders, or embedded:NAME")
    what.add_argument(
        "--run",
        nargs="+",
        default=[],
        metavar="DIR",
        help="output folders or checkpoints of training: all their agents",
    )
    what.add_argument(
        "--benchmarks",
        nargs="+",
        default=PAPER_BENCHMARKS,
        metavar="BENCHMARK",
        help=f"{', '.join([*BENCHMARKS, *EMBEDDED_TASKS])}, an id on the Hub, or a .jsonl or .parquet file; "
        "default: the paper's",
    )
    what.add_argument("--columns", help="columns of local files: problem=...,answer=...")
    what.add_argument("--limit", type=_positive, help="the first so many problems of each benchmark")
    how = parser.add_argument_group("how")
    how.add_argument("--backend", choices=DEFAULT_BATCH_SIZE, default="transformers")
    how.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default 1, as in training")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0)
    how.add_argument("--num-samples", type=_positive, help="samples of each problem; default: as the metrics need")
    how.add_argument("--metrics", nargs="+", type=Metric.parse, metavar="METRIC", help="such as avg@4 pass@8 maj@8")
    how.add_argument("--max-completion-length", type=_positive, help="tokens; default 8192 on AIME 2025, else 4096")
    how.add_argument("--batch-size", type=_positive, help="default: 32, with vllm 1024")
    how.add_argument("--dtype", help="default: bfloat16 with an accelerator, else float32")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--chat-template", help="a Jinja template, a file, or 'plain'; default: the tokenizers' own")
    how.add_argument("--chat-template-kwargs", type=json.loads, help="JSON, such as '{\"enable_thinking\": false}'")
    how.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs of a model in vllm")
    how.add_argument("--trust-remote-code", action="store_true")
    how.add_argument("--output-dir", type=Path, default=Path("outputs/evaluation"))
    args = parser.parse_args(argv)
    if args.temperature < 0:
        parser.error(f"--temperature must not be negative, but is {args.temperature}.")
    if args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE[args.backend]
    return args


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    import logging

    from rich.console import Console

    with heavy_imports():
        import transformers

        from ..evaluation.run import evaluate, prepare

    console = Console()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        with user_errors():
            jobs = prepare(args, console)
        report = evaluate(jobs, args, console)
    except KeyboardInterrupt:
        console.print("Broken off. The same command continues.")
        raise SystemExit(130) from None
    report.print(console)
    console.print(
        f"{args.output_dir}/results.json, results.md, completions/", highlight=False, markup=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
