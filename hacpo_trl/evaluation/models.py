"""The models of an evaluation: found, described as agents of training, and loaded into a backend."""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import create_model_from_path

from ..agent import Agent
from ..config import AgentConfig, HACPOConfig
from ..embedded import EMBEDDED, policy_path
from ..files import AGENT_SETTINGS
from ..generation.backend import GenerationBackend
from ..generation.transformers_generation import TransformersGeneration
from .tasks import Task
from .vllm_offline import VLLMEngine, VLLMGeneration


ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Model:
    """A model to evaluate.

    Attributes:
        label: What tables call it.
        path: Its id or folder.
        adapter: Whether the folder holds a PEFT adapter.
        base: Id or folder of the full weights: `path`, or the adapter's base model.
        chat_template_kwargs: How it was prompted in training, as far as its tokenizer does not say.
    """

    label: str
    path: str
    adapter: bool
    base: str
    chat_template_kwargs: Mapping[str, Any]

    @classmethod
    def at(cls, label: str, path: str) -> "Model":
        folder = Path(path)
        adapter = (folder / ADAPTER_CONFIG).is_file()
        base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] if adapter else path
        if not base:
            raise ValueError(f"The adapter {path} does not name its base model in {ADAPTER_CONFIG}.")
        settings = folder / AGENT_SETTINGS
        kwargs = json.loads(settings.read_text())["chat_template_kwargs"] if settings.is_file() else {}
        return cls(label, path, adapter, base, kwargs)

    @property
    def tokenizer(self) -> str:
        """Id or folder of the tokenizer; an adapter's folder may have none."""
        has_own = not self.adapter or (Path(self.path) / "tokenizer_config.json").is_file()
        return self.path if has_own else self.base

    @property
    def slug(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_-]+", "-", self.label).strip("-_") or "model"

    def weights(self) -> str:
        """A fingerprint of local weights; training goes on in a folder of the same name."""
        folders = {Path(path) for path in (self.path, self.base) if Path(path).is_dir()}
        files = sorted(f for folder in folders for f in folder.iterdir() if f.suffix in (".safetensors", ".bin"))
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def find_models(names: Sequence[str], runs: Sequence[str], console: Console) -> list[Model]:
    """The models by name or path, and every agent of the runs."""
    models = []
    for name in names:
        embedded = name.startswith(EMBEDDED)
        path = policy_path(name.removeprefix(EMBEDDED), progress=console.print) if embedded else name
        models.append(Model.at(name, path))
    for run in runs:
        models += [Model.at(f"{Path(run).absolute().name}/{agent.name}", str(agent)) for agent in agent_folders(run)]
    if not models:
        raise ValueError("There is nothing to evaluate: give --models or --run.")
    slugs = [model.slug for model in models]
    if alike := [model.label for model in models if slugs.count(model.slug) > 1]:
        raise ValueError(
            f"The models {alike} would share a folder of completions. Evaluate them in two calls, each with its own "
            "--output-dir."
        )
    return models


def agent_folders(run: str) -> list[Path]:
    """The folders of a run's agents, in an output folder or a checkpoint of it."""
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"--run {run}: there is no such folder.")
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    agents = [f for f in subfolders if (f / "config.json").is_file() or (f / ADAPTER_CONFIG).is_file()]
    if not agents:
        checkpoints = [f.name for f in subfolders if f.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")]
        hint = f" Name one of its checkpoints: {', '.join(checkpoints)}." if checkpoints else ""
        raise ValueError(f"--run {run} holds no agent: no subfolder has a config.json or an {ADAPTER_CONFIG}.{hint}")
    return agents


@dataclass
class PolicyDescription:
    """What an `Agent` asks of its policy when the weights are elsewhere: not loaded yet, or in vLLM."""

    config: PretrainedConfig
    generation_config: GenerationConfig


def describe(model: Model, args: argparse.Namespace) -> tuple[PolicyDescription, PreTrainedTokenizerBase]:
    remote = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(model.base, **remote)
    try:
        generation_config = GenerationConfig.from_pretrained(model.base)
    except OSError:  # the model has no such file
        generation_config = GenerationConfig.from_model_config(config)
    return PolicyDescription(config, generation_config), AutoTokenizer.from_pretrained(model.tokenizer, **remote)


def make_agent(
    model: Model,
    description: PolicyDescription,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    args: argparse.Namespace,
) -> Agent:
    """The model as an agent of training, with this task's sampling settings."""
    greedy = args.temperature == 0
    settings = HACPOConfig(
        str(args.output_dir),
        report_to="none",
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
        max_completion_length=task.max_completion_length,
        temperature=1.0 if greedy else args.temperature,
        top_p=1.0 if greedy else args.top_p,
        top_k=args.top_k,
        chat_template_kwargs={**model.chat_template_kwargs, **(args.chat_template_kwargs or {})},
    )
    agent = Agent(AgentConfig(model.slug, chat_template=args.chat_template), settings, description, tokenizer)
    if greedy:
        agent.sample_greedily()
    return agent


def load_backend(model: Model, args: argparse.Namespace, max_length: int) -> Callable[[Agent], GenerationBackend]:
    """Loads a model's weights; returns what samples from them for an agent."""
    if args.backend == "vllm":
        rank = json.loads((Path(model.path) / ADAPTER_CONFIG).read_text())["r"] if model.adapter else None
        engine = VLLMEngine(
            model.base,
            tokenizer=model.tokenizer,
            dtype=args.dtype,
            max_model_length=max_length,
            adapter=model.path if model.adapter else None,
            adapter_rank=rank,
            seed=args.seed,
            tensor_parallel_size=args.tensor_parallel_size,
            trust_remote_code=args.trust_remote_code,
        )
        return lambda agent: VLLMGeneration(agent, engine)
    accelerator = Accelerator()
    policy = create_model_from_path(model.base, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if model.adapter:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(policy, model.path)
    if not hasattr(policy, "hf_device_map"):
        policy.to(accelerator.device)
    return lambda agent: TransformersGeneration({agent.name: agent}, lambda name: (accelerator, policy), True)
