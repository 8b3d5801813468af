"""An agent at work: a policy together with its tokenizer, chat template and sampling settings.

Everything that differs between agents is decided here, once, so that the trainer can treat them alike.
"""

import bisect
import copy
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .config import AgentConfig, HACPOConfig
from .files import AGENT_SETTINGS
from .options.generation import stop_strings_of
from .options.secrets import without_secrets
from .rollouts.retokenization import decode_completion, retokenize
from .rollouts.rollout import LearnerView, Prompt, Rollout


logger = logging.getLogger(__name__)

# The date that Llama 3.2's template falls back to. A template that printed today's would give a resumed run other
# prompts.
TEMPLATE_DATE = date(2024, 7, 26)
STRFTIME_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")

# In a PEFT model, a frozen copy of an adapter that was trained before: what the KL term measures the distance to.
REFERENCE_ADAPTER = "ref"

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def merged(run: dict | str | None, own: dict | None) -> dict[str, Any]:
    """Keyword arguments of the run, with an agent's own on top. TrainingArguments has parsed the text of the first."""
    assert not isinstance(run, str)
    return {**(run or {}), **(own or {})}


def freeze_template_date(template: str) -> str:
    """Replaces `strftime_now("...")` in a chat template by a fixed date, so that prompts do not change overnight."""
    return STRFTIME_CALL.sub(lambda call: repr(TEMPLATE_DATE.strftime(call["format"])), template)


class Agent:
    """One agent: policy, tokenizer, chat template, sampling.

    Args:
        config: The agent's own settings.
        args: The run's settings, which fill what the agent leaves open.
        policy: The model that is trained, not wrapped for any backend.
        tokenizer: Its tokenizer. A missing pad token becomes the EOS token, as in TRL.
    """

    def __init__(
        self, config: AgentConfig, args: HACPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ):
        self.config = config
        self.name = config.name
        self.policy = policy
        self.tokenizer = tokenizer
        self._args = args

        if self.is_adapter:
            from peft.tuners.tuners_utils import BaseTunerLayer

            if isinstance(policy.get_output_embeddings(), BaseTunerLayer):
                raise ValueError(
                    f"Agent '{self.name}': its adapter targets the language-model head, which log-probabilities are "
                    "computed from directly, so that the adapter would not be trained. Take it out of target_modules."
                )
        if config.eos_token is not None:
            if config.eos_token not in tokenizer.get_vocab():
                raise ValueError(f"Agent '{self.name}': eos_token {config.eos_token!r} is not in its tokenizer.")
            tokenizer.eos_token = config.eos_token
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"Agent '{self.name}': its tokenizer has no EOS token, so no answer could ever end. Set eos_token."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.end_of_turn_id: int = tokenizer.eos_token_id
        self.stop_token_ids = self._stop_token_ids()
        self.stop_strings = stop_strings_of(self.generation_kwargs, args.use_vllm, f"Agent '{self.name}': ")
        self._tell_policy_its_stops()
        self.chat_template = self._chat_template()
        self.chat_template_kwargs = merged(args.chat_template_kwargs, config.chat_template_kwargs)
        # Llama 3.2's template reads this variable before it asks for today's date.
        self.chat_template_kwargs.setdefault("date_string", TEMPLATE_DATE.strftime("%d %b %Y"))
        self._wants_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

        self.temperature: float = self.setting("temperature")
        self.max_completion_length: int = self.setting("max_completion_length")
        self.generation_config = self._generation_config(args)
        self.max_model_length = self._max_model_length()

    def setting(self, name: str) -> Any:
        """One of the settings that `AgentConfig` shares with `HACPOConfig`: the agent's own, or else the run's."""
        own = getattr(self.config, name)
        return getattr(self._args, name) if own is None else own

    @property
    def is_adapter(self) -> bool:
        """Whether the agent trains a PEFT adapter instead of all weights."""
        return hasattr(self.policy, "peft_config")

    def _tell_policy_its_stops(self):
        """What is saved with the policy ends and pads answers as training does, also under another `eos_token`."""
        text_config = self.policy.config.get_text_config()
        text_config.pad_token_id = self.tokenizer.pad_token_id
        text_config.eos_token_id = self.end_of_turn_id
        saved = getattr(self.policy, "generation_config", None)
        if saved is not None:
            saved.pad_token_id = self.tokenizer.pad_token_id
            saved.eos_token_id = self.stop_token_ids if len(self.stop_token_ids) > 1 else self.end_of_turn_id

    def _stop_token_ids(self) -> list[int]:
        """Every id that ends an answer: the tokenizer's EOS and all that the model declares, such as an end of
        turn."""
        declared = getattr(self.policy.generation_config, "eos_token_id", None)
        declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
        return sorted({self.tokenizer.eos_token_id, *declared})

    def _chat_template(self) -> str | None:
        template: Any = self.config.chat_template
        if template == "plain":
            template = PLAIN_TEMPLATE
        elif template is not None and "{" not in template:
            if not Path(template).is_file():
                raise ValueError(
                    f"Agent '{self.name}': chat_template {template!r} is no Jinja template, no file and not 'plain'."
                )
            template = Path(template).read_text(encoding="utf-8")
        template = template if template is not None else self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            return None
        template = freeze_template_date(template)
        if "strftime_now(" in template:
            logger.warning(
                f"Agent '{self.name}': its chat template prints today's date in a way that cannot be fixed, so a run "
                "resumed on another day sees other prompts. Set chat_template to a template with a fixed date."
            )
        return template

    def _generation_config(self, args: HACPOConfig) -> GenerationConfig:
        """All sampling parameters, spelled out: none is left for the model's own generation_config to fill in."""
        kwargs = {
            "max_new_tokens": self.max_completion_length,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.setting("top_p"),
            "top_k": self.setting("top_k"),
            "min_p": self.setting("min_p"),
            "repetition_penalty": self.setting("repetition_penalty"),
            "bos_token_id": self.tokenizer.bos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.stop_token_ids,
            # vLLM takes its own further arguments, by its own names.
            **({} if args.use_vllm else self.generation_kwargs),
        }
        return GenerationConfig(**kwargs, disable_compile=True)

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """Further arguments of generation, the run's and the agent's."""
        return merged(self._args.generation_kwargs, self.config.generation_kwargs)

    @property
    def vllm_sampling(self) -> dict[str, Any]:
        """Sampling settings, by the names that TRL's classes for vLLM share."""
        settings = self.generation_config
        return {
            "repetition_penalty": settings.repetition_penalty,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
            "generation_kwargs": {"stop_token_ids": self.stop_token_ids, **self.generation_kwargs},
        }

    def sample_greedily(self):
        """From here on the most likely token, for evaluation."""
        self.generation_config.do_sample = False
        self.generation_config.temperature = self.generation_config.top_p = self.generation_config.top_k = None
        self.generation_config.min_p = None

    def end_of_stop_string(self, ids: Sequence[int]) -> int | None:
        """How many of an answer's ids it takes until its text holds one of the stop strings; None if it never does."""

        def stops(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
            return any(string in text for string in self.stop_strings)

        if not self.stop_strings or not stops(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids) + 1), True, key=stops)

    @property
    def model_name(self) -> str | None:
        """Id or path that the weights without an adapter were loaded from; None for ones that were built in memory."""
        if self.is_adapter:
            return self.policy.peft_config[self.policy.active_adapter].base_model_name_or_path or None
        return self.config.model_name_or_path or getattr(self.policy.config, "_name_or_path", None) or None

    def _max_model_length(self) -> int:
        context = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (self.config.max_model_length, context) if limit is not None]
        if not limits:
            raise ValueError(
                f"Agent '{self.name}': its model's config names no max_position_embeddings. Set max_model_length."
            )
        if self.max_completion_length >= min(limits):
            raise ValueError(
                f"Agent '{self.name}': max_completion_length={self.max_completion_length} leaves no room for a prompt "
                f"in its context of {min(limits)} tokens."
            )
        return min(limits)

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt, in this agent's tokens, that leaves room for the longest answer."""
        return self.max_model_length - self.max_completion_length

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """A prompt in this agent's tokens: its chat template for messages, as it is for plain text.

        A BOS token stands in front exactly once if the template or the tokenizer wants one.
        """
        self._check_prompt(prompt)
        if not isinstance(prompt, str):
            if self.chat_template is None:
                raise ValueError(
                    f"Agent '{self.name}': the prompts are conversations, but its tokenizer has no chat template. "
                    "Set chat_template to a template, a file, or 'plain'."
                )
            try:
                ids = self.tokenizer.apply_chat_template(
                    prompt,
                    chat_template=self.chat_template,
                    # What the assistant has begun to say is continued.
                    add_generation_prompt=prompt[-1]["role"] != "assistant",
                    continue_final_message=prompt[-1]["role"] == "assistant",
                    tokenize=True,
                    return_dict=True,
                    **self.chat_template_kwargs,
                )["input_ids"]
            except TemplateError as error:
                raise ValueError(
                    f"Agent '{self.name}': its chat template refuses a prompt with the roles "
                    f"{[message['role'] for message in prompt]} ({error}). Give it other messages, or the agent "
                    "another chat_template."
                ) from error
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if bos is not None:
            while ids[:2] == [bos, bos]:
                ids = ids[1:]
            if self._wants_bos and ids[:1] != [bos]:
                ids = [bos, *ids]
        if not ids:
            raise ValueError(f"Agent '{self.name}': the prompt {prompt!r} is empty in its tokens.")
        return list(ids)

    def _check_prompt(self, prompt: Any):
        """Raises where a prompt is neither a text nor a conversation of texts."""
        if isinstance(prompt, str):
            return
        if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
            raise ValueError(
                f"Agent '{self.name}': a prompt must be a text or a list of messages with role and content, not "
                f"{str(prompt)[:80]!r} ({type(prompt).__name__})."
            )
        for message in prompt:
            blocks = message.get("content") if isinstance(message.get("content"), list) else []
            kinds = {block.get("type") for block in blocks if isinstance(block, dict)} - {"text"}
            if kinds:
                raise ValueError(
                    f"Agent '{self.name}': a prompt has blocks of {sorted(map(str, kinds))}, not of text."
                )

    def render(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompts in this agent's tokens (see `encode_prompt`), each short enough for the longest answer."""
        rendered = []
        for prompt in prompts:
            ids = self.encode_prompt(prompt)
            if len(ids) > self.max_prompt_length:
                raise ValueError(
                    f"Agent '{self.name}': a prompt of {len(ids)} tokens and max_completion_length="
                    f"{self.max_completion_length} exceed its context of {self.max_model_length} tokens. The prompt "
                    f"begins with {str(prompt)[:80]!r}."
                )
            rendered.append(ids)
        return rendered

    def text_for_rewards(self, completion_ids: Sequence[int]) -> str:
        """What reward functions read of this agent's sampled ids: the text, with special tokens if they ask for them
        (`rewards_see_special_tokens`), always without the final stop token."""
        text, _ = self.decode(completion_ids)
        if not self._args.rewards_see_special_tokens:
            return text
        ends = completion_ids[-1:] and completion_ids[-1] in self.stop_token_ids
        ids = list(completion_ids[:-1] if ends else completion_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode(self, completion_ids: Sequence[int]) -> tuple[str, bool]:
        """The text of this agent's own sampled ids, and whether it stands for them."""
        return decode_completion(self.tokenizer, completion_ids, self.stop_token_ids)

    def view(self, rollouts: Sequence[Rollout], prompt_ids: Sequence[Sequence[int]]) -> list[LearnerView]:
        """What this agent, as a learner, makes of rollouts: its own as sampled, a peer's retokenized.

        Args:
            rollouts: Rollouts of any agents.
            prompt_ids: The step's prompts in this agent's tokens, by `Rollout.prompt_index`.
        """
        peers = [rollout for rollout in rollouts if rollout.agent != self.name]
        encoded = retokenize(
            self.tokenizer,
            [rollout.text for rollout in peers],
            [rollout.finish_reason == "stop" for rollout in peers],
            self.end_of_turn_id,
            [prompt_ids[rollout.prompt_index] for rollout in peers],
        )
        translated = iter(encoded)
        views = []
        for rollout in rollouts:
            prompt = tuple(prompt_ids[rollout.prompt_index])
            if rollout.agent == self.name:
                views.append(LearnerView(rollout, prompt, rollout.completion_ids, dropped=None))
                continue
            ids, same_text = next(translated)
            if not rollout.decodable:
                reason = "undecodable"
            elif not same_text:
                reason = "round_trip"
            elif not ids:
                reason = "empty"
            elif len(prompt) + len(ids) > self.max_model_length:
                reason = "too_long"
            else:
                reason = None
            views.append(LearnerView(rollout, prompt, tuple(ids), reason))
        return views

    def save_tokenizer(self, folder: Path):
        """Saves the tokenizer such that whoever loads it prompts the agent as in training.

        The chat template of the agent's settings is in it. What no tokenizer holds, the template's keyword arguments,
        lies beside it.
        """
        tokenizer = copy.copy(self.tokenizer)
        if self.config.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        tokenizer.save_pretrained(folder)
        settings = without_secrets({"chat_template_kwargs": self.chat_template_kwargs})
        (folder / AGENT_SETTINGS).write_text(json.dumps(settings), encoding="utf-8")

    def sampling_seed(self, mode: str, step: int, process: int) -> int:
        """The seed of this agent's samples: a stream of its own, the same whatever the other agents are and do."""
        key = f"{self._args.seed}/{self.name}/{mode}/{step}/{process}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
