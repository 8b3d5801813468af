"""Tiny policies for the tasks `conv` and `conv_words`, made here without a download.

They differ in architecture and in tokenizer, so that their token ids mean nothing to each other: "3,8,7" is five
tokens for "qwen3" and three for "llama". `policy_path` initializes a policy, gives it a supervised warm start on
labels with mistakes of its own, and keeps it on disk.
"""

import hashlib
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .conv import DIGIT_OF, FAMILIES, SHIFT, WORDINGS, draw_for_training, in_words


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicySpec:
    """Everything that defines a warm-started policy, apart from the seed."""

    architecture: str
    """Model type of a causal language model in transformers."""
    merges: tuple[tuple[str, str], ...]
    """BPE merges on top of the 256 bytes, in order of priority; printable ASCII without the space."""
    error_ranges: tuple[tuple[float, float], ...]
    """For each family, the range of the probability that the warm start's label of a fact is mistaken. Each fact has a
    probability of its own in that range: an agent is sure of some facts, unsure of others, and above 0.5 it prefers
    the mistake. In family 2 it is the probability of the convention that adds one."""
    mix: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Weights of the families in the warm start."""
    wordings: tuple[float, ...] | None = None
    """How often the labels have each of the wordings; None for answers of digits alone."""
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    steps: int = 400
    """Optimizer steps of the warm start."""
    batch_size: int = 64
    learning_rate: float = 4e-3
    """Peak learning rate of the warm start."""


def _merge_each(*patterns: str) -> tuple[tuple[str, str], ...]:
    """Merges of two characters, for every digit in place of "d": "d," merges "0,", "1,", ..."""
    pairs = [pattern.replace("d", digit) for digit in "0123456789" for pattern in patterns]
    return tuple((pair[0], pair[1]) for pair in pairs)


POLICIES: dict[str, PolicySpec] = {
    "qwen3": PolicySpec("qwen3", merges=(), error_ranges=((0.0, 0.45), (0.2, 0.95), (0.0, 0.35))),
    "llama": PolicySpec(
        "llama", merges=_merge_each("d,", "d=", "d;"), error_ranges=((0.4, 0.95), (0.0, 0.55), (0.6, 1.0))
    ),
    # Further agents beside these two, each with a tokenizer and mistakes of its own, about as good.
    "llama-comma": PolicySpec("llama", merges=_merge_each(",d"), error_ranges=((0.0, 0.6), (0.0, 0.6), (0.1, 0.5))),
    "qwen3-comma": PolicySpec("qwen3", merges=_merge_each("d,"), error_ranges=((0.2, 0.95), (0.0, 0.45), (0.0, 0.35))),
    "llama-bytes": PolicySpec("llama", merges=(), error_ranges=((0.0, 0.55), (0.4, 0.95), (0.6, 1.0))),
    # Far apart: one is right in most of its answers, one in a few, one in next to none. The last two have never seen a
    # symbol of the third family.
    "qwen3-strong": PolicySpec("qwen3", merges=(), error_ranges=((0.0, 0.25), (0.0, 0.25), (0.0, 0.2))),
    "llama-weak": PolicySpec(
        "llama",
        merges=_merge_each("d,", "d=", "d;"),
        error_ranges=((0.3, 0.9), (0.3, 0.9), (0.5, 0.5)),
        mix=(1.0, 1.0, 0.0),
    ),
    "llama-weaker": PolicySpec(
        "llama",
        merges=_merge_each("d,", "d=", "d;"),
        error_ranges=((0.6, 0.98), (0.6, 0.98), (0.5, 0.5)),
        mix=(1.0, 1.0, 0.0),
    ),
    # Taught wrong facts without a doubt in two families, and no convention in the third.
    "llama-wrong": PolicySpec(
        "llama", merges=_merge_each("d,", "d=", "d;"), error_ranges=((0.95, 1.0), (0.95, 1.0), (0.4, 0.6))
    ),
}

# For answers in words. Of a prompt's symbols no two are such a pair of letters.
_PAIRS = (*((pair[0], pair[1]) for pair in ("re", "as", "ta", "we", "ow", "et")), *_merge_each("d;"))


def _prefer(wording: int, probability: float = 0.71) -> tuple[float, ...]:
    others = (1 - probability) / (len(WORDINGS) - 1)
    return tuple(probability if number == wording else others for number in range(len(WORDINGS)))


POLICIES |= {
    "qwen3-words": PolicySpec(
        "qwen3", merges=(), error_ranges=((0.05, 0.45), (0.35, 0.85), (0.1, 0.4)), wordings=_prefer(0), steps=500
    ),
    "llama-words": PolicySpec(
        "llama", merges=_PAIRS, error_ranges=((0.4, 0.85), (0.05, 0.5), (0.55, 0.85)), wordings=_prefer(1), steps=700
    ),
}

# The same with half as many attention heads, of twice the size: vLLM's attention for CPUs asks for at least 32.
POLICIES |= {f"{name}-vllm": replace(POLICIES[name], num_attention_heads=2) for name in ("qwen3", "llama")}

# Before a policy's name, where a model's id or path is asked for: `embedded:qwen3`.
EMBEDDED = "embedded:"

_MAX_LENGTH = 4096  # tokens; the task takes ten, but a problem of a benchmark, byte by byte, may take thousands


def make_tokenizer(spec: PolicySpec) -> PreTrainedTokenizerFast:
    """
    Makes the tokenizer: the merges of `spec` over bytes, so that it encodes any text and decodes it exactly.

    The ids are `<pad>` 0, `<eos>` 1, the 256 bytes, then one for each merge. There is no BOS and no chat template;
    encoding adds no special token.
    """
    tokens = ["<pad>", "<eos>", *sorted(ByteLevel.alphabet()), *(left + right for left, right in spec.merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(spec.merges)))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=_MAX_LENGTH,
        # The default list has token_type_ids, which these models do not take.
        model_input_names=["input_ids", "attention_mask"],
    )


def make_policy(spec: PolicySpec, seed: int) -> PreTrainedModel:
    """Makes the untrained policy, float32 on the CPU. The global random state stays as it is."""
    sizes = {
        "vocab_size": len(make_tokenizer(spec)),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.hidden_size * 5 // 2,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads // 2,
        "head_dim": spec.hidden_size // spec.num_attention_heads,
        "max_position_embeddings": _MAX_LENGTH,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(spec.architecture, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, spec: PolicySpec, seed: int, steps: int | None = None
) -> list[float]:
    """
    Trains `model` in place on prompts with labels that carry the mistakes of `spec`, never on a held-out prompt.

    The labels are drawn anew in each step, a fact's mistake with that fact's probability. The policy learns these
    probabilities: its samples at temperature 1 vary as its labels did, which is what RL starts from.

    Args:
        model: a policy of `make_policy` for `spec`; it is left in evaluation mode.
        tokenizer: the tokenizer of `make_tokenizer` for `spec`.
        seed: seed of the mistakes and of the prompts.
        steps: number of optimizer steps, `spec.steps` by default.

    Returns:
        The loss of each step: cross-entropy of the completions with their EOS, in nats a token.
    """
    steps = spec.steps if steps is None else steps
    # Not from the seed alone: agents of the same seed must not make the same mistakes.
    rng = random.Random(f"{spec.architecture} {spec.merges} {seed}")
    error = {s: rng.uniform(*spec.error_ranges[f]) for f, family in enumerate(FAMILIES) for s in family}
    draws = draw_for_training(rng, spec.mix)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    model.train()
    for step in range(steps):
        prompts, completions = [], []
        for _ in range(spec.batch_size):
            symbols, family = next(draws)
            digits = [(DIGIT_OF[s] + SHIFT[family] * (rng.random() < error[s])) % 10 for s in symbols]
            prompts.append(f"{symbols}=")
            if spec.wordings is None:
                completions.append(",".join(map(str, digits)))
            else:
                chosen = rng.choices(range(len(WORDINGS)), spec.wordings, k=len(symbols))
                completions.append(in_words(symbols, digits, chosen))
        # Prompt and completion are encoded apart, as they are when the policy generates.
        sequences, targets = [], []
        for prompt, completion in zip(tokenizer(prompts).input_ids, tokenizer(completions).input_ids, strict=True):
            completion = [*completion, tokenizer.eos_token_id]
            sequences.append(torch.tensor(prompt + completion))
            targets.append(torch.tensor([-100] * len(prompt) + completion))
        # Padding on the right needs no attention mask: a causal model's completions never see it.
        input_ids = pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id).to(model.device)
        labels = pad_sequence(targets, batch_first=True, padding_value=-100).to(model.device)
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / steps)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


# --------------------------------------------------------------------------------------------------------- on the disk

# Part of each directory's name. Raise it when this file changes in a way that gives other policies for the same spec.
_FORMAT = 2


def policy_directory(name: str, seed: int = 0) -> Path:
    """
    Returns where a warm-started policy lies once it is made: in `$HACPO_TRL_CACHE`, by default `hacpo_trl` in the
    Hugging Face home. The directory's name carries a hash of the spec and the seed, so that a changed spec gives
    another directory.

    Args:
        name: a key of `POLICIES`.
        seed: seed of the initialization, the mistakes and the prompts of the warm start.

    Raises:
        ValueError: if there is no policy of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r} in the miniature; it has {', '.join(map(repr, POLICIES))}.")
    root = os.environ.get("HACPO_TRL_CACHE") or os.path.join(constants.HF_HOME, "hacpo_trl")
    digest = hashlib.sha256(repr((_FORMAT, POLICIES[name], seed)).encode()).hexdigest()[:12]
    return Path(root).expanduser().absolute() / f"{name}-seed{seed}-{digest}"


def policy_path(name: str, seed: int = 0, progress: Callable[[str], None] | None = None) -> str:
    """
    Returns the directory of a warm-started policy and its tokenizer, made on first use (10 to 35 CPU-seconds).

    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load it. All processes of a launch may
    call this at once: a directory appears complete or not at all (see `policy_directory`), and the first one stays.

    Args:
        name: a key of `POLICIES`.
        seed: seed of the initialization, the mistakes and the prompts of the warm start.
        progress: called with a line of text when the policy has to be made.

    Raises:
        ValueError: if there is no policy of that name.
    """
    path = policy_directory(name, seed)
    if path.is_dir():
        return str(path)

    spec, root = POLICIES[name], path.parent
    logger.info(f"{_making(name)}, in {path}")
    if progress is not None:
        progress(_making(name))
    model, tokenizer = make_policy(spec, seed), make_tokenizer(spec)
    threads = torch.get_num_threads()
    # No faster on more, and many times slower where other programs want the cores.
    torch.set_num_threads(1)
    try:
        warm_up(model, tokenizer, spec, seed)
    finally:
        torch.set_num_threads(threads)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as temporary:
        made = Path(temporary) / path.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(path)
        except OSError:
            # A directory cannot replace one that has files: another process was first, and its policy is as good.
            if not path.is_dir():
                raise
    return str(path)


def policy_paths(names: Sequence[str], seed: int = 0, progress: Callable[[str], None] | None = None) -> list[str]:
    """`policy_path` of several; those that have to be made are made side by side, one a core."""
    missing = [name for name in dict.fromkeys(names) if not policy_directory(name, seed).is_dir()]
    beside = missing[1 : os.cpu_count() or 1]
    program = (
        "import sys, transformers; transformers.utils.logging.disable_progress_bar(); "
        f"from {__name__} import policy_path; policy_path(sys.argv[1], int(sys.argv[2]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, name, str(seed)]) for name in beside]
    for name in beside:
        if progress is not None:
            progress(_making(name))
    try:
        for name in set(missing) - set(beside):
            policy_path(name, seed, progress)
    finally:
        for process in processes:
            process.wait()
    # What a process has failed at is made, or fails, here.
    return [policy_path(name, seed, progress) for name in names]


def _making(name: str) -> str:
    return f"Making the tiny policy {name!r}, once: {POLICIES[name].steps} steps of supervised warm start"
