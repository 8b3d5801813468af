"""Tiny agents for the trainer's tests: untrained policies of the miniature, and answers that are scripted, not
sampled."""

import random
from collections.abc import Mapping

import torch
from datasets import Dataset
from peft import LoraConfig

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.embedded import POLICIES, conv_dataset
from hacpo_trl.embedded.policies import make_policy, make_tokenizer
from hacpo_trl.generation.backend import Completion, GenerationRequest


# For comparing runs to rounding error: Adam would blow noise up wherever a gradient is next to 0.
PLAIN_SGD = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant"}

# What each agent may have of its own, far from the other's and from PLAIN_SGD's. Both are clipped: gradient norms are
# about 2 and 0.6.
OWN_SETTINGS = {
    "agents": [
        {"name": "qwen", "learning_rate": 0.6, "max_grad_norm": 0.5, "lr_scheduler_type": "linear"},
        {
            "name": "llama",
            "learning_rate": 0.2,
            "max_grad_norm": 0.25,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
        },
    ]
}

ARCHITECTURES = {"qwen": "qwen3", "llama": "llama", "third": "llama"}


def tokenizer(name: str):
    return make_tokenizer(POLICIES[ARCHITECTURES[name]])


def policy(name: str, seed: int = 0):
    return make_policy(POLICIES[ARCHITECTURES[name]], seed + len(name))


def adapter(agent: str = "llama") -> dict:
    """Arguments of `trainer` that make one agent train an adapter, with the same initial weights at each call if the
    models are loaded."""
    torch.manual_seed(0)
    return {"peft_configs": {agent: LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}}


def partial_reward(completions, answer, **kwargs) -> list[float]:
    """The share of the answer's characters that a completion has: a reward with many values."""
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer, strict=True)]


def uneven_reward(completions, answer, agent, **kwargs) -> list[float]:
    """Each agent has prompts of its own that are hopeless for it: its peers tell less about those."""
    shares = partial_reward(completions, answer)
    return [0.0 if int(a[0]) % 3 == len(agent) % 3 else share for share, a in zip(shares, answer, strict=True)]


class ScriptedGeneration:
    """Answers that depend on agent, prompt and number alone: the same however prompts are dealt to processes.

    Args:
        agents: Names of the agents.
        cut: For these agents every answer is one byte of a longer character, which has no text, on the prompts that
            `where` holds for.
        where: Tells from the prompt's text.
        with_logps: Whether answers carry log-probabilities, as a sampler of its own gives them: about those of an
            untrained policy.
    """

    def __init__(self, agents, cut=(), where=lambda prompt: True, with_logps=False):
        self.tokenizers = {name: tokenizer(name) for name in agents}
        self.cut, self.where, self.with_logps = cut, where, with_logps

    def answer(self, name: str, prompt: str, number: int) -> Completion:
        rng = random.Random(f"{name} {prompt} {number}")
        tok = self.tokenizers[name]
        if name in self.cut and self.where(prompt):
            return Completion((tok("é").input_ids[0],), "length")
        ids = tok(",".join(str(rng.randrange(10)) for _ in range(rng.randrange(1, 4)))).input_ids
        finish_reason = "length" if rng.random() < 0.2 else "stop"
        if finish_reason == "stop":
            ids = [*ids, tok.eos_token_id]
        logps = tuple(rng.gauss(-5.6, 0.3) for _ in ids) if self.with_logps else None
        return Completion(tuple(ids), finish_reason, logps)

    def sync_weights(self):
        pass

    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        return {
            name: [
                self.answer(name, self.tokenizers[name].decode(ids), number)
                for ids in request.prompt_ids
                for number in range(request.num_generations)
            ]
            for name, request in requests.items()
        }


def config(output_dir, **kwargs) -> HACPOConfig:
    settings = {
        "prompts_per_step": 4,
        "num_generations": 2,
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return HACPOConfig(str(output_dir), **{**settings, **kwargs})


def trainer(
    output_dir, names=("qwen", "llama"), prompts: Dataset | int = 8, generation="scripted", models=None, **kwargs
):
    """A trainer over tiny agents; `kwargs` go to HACPOConfig, but for what HACPOTrainer takes itself."""
    own = {
        k: kwargs.pop(k) for k in ("eval_dataset", "peft_configs", "callbacks", "processing_classes") if k in kwargs
    }
    own.setdefault("processing_classes", {name: tokenizer(name) for name in names})
    reward_funcs = kwargs.pop("reward_funcs", partial_reward)
    return HACPOTrainer(
        {name: policy(name) for name in names} if models is None else models,
        reward_funcs,
        config(output_dir, **kwargs),
        conv_dataset("train", prompts) if isinstance(prompts, int) else prompts,
        generation_backend=ScriptedGeneration(names) if generation == "scripted" else generation,
        **own,
    )


def parameters(trainer: HACPOTrainer, name: str) -> torch.Tensor:
    """All parameters of one agent, in one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.agents[name].policy.parameters()])
