"""Agents small enough to build in a test."""

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, set_seed

from hacpo_trl.agent import Agent
from hacpo_trl.config import AgentConfig, HACPOConfig


def run_config(**settings) -> HACPOConfig:
    return HACPOConfig("unused", **{"report_to": "none", "max_completion_length": 16, **settings})


def tiny_policy(vocab_size: int, seed: int = 0) -> LlamaForCausalLM:
    """One layer, random weights; its logits spread over a few nats."""
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def tiny_agent(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    policy: LlamaForCausalLM | None = None,
    args: HACPOConfig | None = None,
    **settings,
) -> Agent:
    policy = tiny_policy(len(tokenizer)) if policy is None else policy
    return Agent(AgentConfig(name, **settings), run_config() if args is None else args, policy, tokenizer)
