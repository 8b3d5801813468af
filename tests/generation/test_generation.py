import copy

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tiny_agents import run_config, tiny_agent, tiny_policy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacpo_trl.generation.backend import (
    Completion,
    GenerationRequest,
    completion_of,
    log_completions,
)
from hacpo_trl.generation.transformers_generation import TransformersGeneration
from hacpo_trl.reporting.metrics import Metrics


PAD, END, SECOND_END = 0, 1, 2
WORDS = ["<pad>", "<end>", "<stop>", *"abcdefghi"]
PROMPTS = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def agent_of(name="a", policy=None, args=None, **settings):
    policy = tiny_policy(len(WORDS)) if policy is None else policy
    args = run_config(max_completion_length=8) if args is None else args
    return tiny_agent(name, tokenizer(), policy, args, **settings)


def generate(agent, seed=1, prompts=PROMPTS, num_generations=4):
    accelerator = Accelerator(cpu=True)
    backend = TransformersGeneration({agent.name: agent}, lambda name: (accelerator, agent.policy), True)
    return backend.generate({agent.name: GenerationRequest(prompts, num_generations, seed)})[agent.name]


# ---- where an answer ends -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "stops", "completion"),
    [
        ([5, 6, 1, 0, 0], [1], Completion((5, 6, 1), "stop")),
        ([5, 6, 2, 0, 0], [1, 2], Completion((5, 6, 2), "stop")),  # a secondary EOS
        ([5, 1, 1, 1], [1], Completion((5, 1), "stop")),  # padding that is the EOS token
        ([5, 6, 7], [1, 2], Completion((5, 6, 7), "length")),
        ([5, 0, 7], [1], Completion((5, 0, 7), "length")),  # a pad token that was sampled is a token
        ([1, 0, 0], [1], Completion((1,), "stop")),
        ([5, 6, 1], [1], Completion((5, 6, 1), "stop")),  # at the very end
        ([5, 2, 1], [1, 2], Completion((5, 2), "stop")),
        ([], [1], Completion((), "length")),
    ],
)
def test_completion_of(ids, stops, completion):
    agent = tiny_agent("agent", tokenizer())
    agent.stop_token_ids = stops
    assert completion_of(agent, ids) == completion


# ---- what is sampled ------------------------------------------------------------------------------------------------
def by_hand(policy, seed, temperature, stops, length=8, num_generations=4):
    """Ancestral sampling token by token, from the softmax of the logits over the temperature and nothing else."""
    sequences = torch.tensor([prompt for prompt in PROMPTS for _ in range(num_generations)])
    finished = torch.zeros(len(sequences), dtype=torch.bool)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(length):
            probabilities = torch.softmax(policy(input_ids=sequences).logits[:, -1] / temperature, dim=-1)
            token = torch.multinomial(probabilities, 1)[:, 0].masked_fill(finished, PAD)
            sequences = torch.cat([sequences, token[:, None]], dim=1)
            finished |= torch.isin(token, torch.tensor(stops))
            if finished.all():
                break
    answers = []
    for ids in sequences[:, 3:].tolist():
        end = next((i for i, token_id in enumerate(ids) if token_id in stops), None)
        answers.append(Completion(tuple(ids), "length") if end is None else Completion(tuple(ids[: end + 1]), "stop"))
    return answers


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_come_from_the_policy_at_its_temperature(temperature):
    agent = agent_of(temperature=temperature)
    completions = generate(agent, seed=3)
    assert completions == by_hand(agent.policy, 3, temperature, [END])
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert len(set(completions)) > 6


MISCHIEF = {
    "suppress_tokens": [4, 5, 6, 7, 8, 9, 10, 11],
    "bad_words_ids": [[3]],
    "min_length": 11,
    "min_new_tokens": 8,
    "max_length": 4,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.9,
    "typical_p": 0.2,
    "temperature": 0.01,
    "do_sample": False,
    "num_beams": 3,
    "forced_eos_token_id": 11,
    "begin_suppress_tokens": [3, 4, 5],
    "pad_token_id": 11,
}


@pytest.mark.parametrize("settings", [{key: value} for key, value in MISCHIEF.items()] + [MISCHIEF], ids=str)
def test_a_models_own_generation_config_does_not_influence_sampling(settings):
    policy = tiny_policy(len(WORDS))
    expected = by_hand(policy, 5, 1.0, [END])
    for key, value in settings.items():
        setattr(policy.generation_config, key, value)
    agent = agent_of(policy=policy)
    before = copy.deepcopy(policy.generation_config)
    assert generate(agent, seed=5) == expected
    # It is still there, for the checkpoint; how answers end and are padded is training's.
    assert policy.generation_config == before
    for key, value in settings.items():
        assert getattr(policy.generation_config, key) == (PAD if key == "pad_token_id" else value)


def test_but_its_stop_tokens_end_an_answer():
    policy = tiny_policy(len(WORDS))
    policy.generation_config.eos_token_id = [SECOND_END]
    agent = agent_of(policy=policy)
    assert agent.stop_token_ids == [END, SECOND_END]
    completions = generate(agent, seed=5)
    assert completions == by_hand(policy, 5, 1.0, [END, SECOND_END])
    assert any(completion.ids[-1] == SECOND_END for completion in completions)


def test_sampling_settings_of_run_and_agent():
    args = run_config(max_completion_length=8, temperature=3.0, generation_kwargs={"suppress_tokens": [3, 4]})
    agent = agent_of(args=args, top_k=1, max_completion_length=5)
    completions = generate(agent)
    # Among the most likely token alone there is no choice: the four answers to a prompt are the same.
    assert all(len(set(completions[i : i + 4])) == 1 for i in (0, 4, 8))
    assert max(len(completion.ids) for completion in completions) == 5
    assert not any({3, 4} & set(completion.ids) for completion in completions)


def test_the_likeliest_answer_is_followed_with_top_k_1():
    agent = agent_of(top_k=1)
    for prompt, completion in zip(PROMPTS, generate(agent, num_generations=1), strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for token_id in completion.ids:
                assert agent.policy(input_ids=torch.tensor([ids])).logits[0, -1].argmax() == token_id
                ids.append(token_id)


def test_prompts_of_different_lengths_are_answered_in_their_order():
    prompts = [[3], [4, 5, 6, 7, 8, 9], [10, 11]]
    agent = agent_of(top_k=1)
    together = generate(agent, prompts=prompts, num_generations=2)
    apart = [generate(agent, prompts=[prompt], num_generations=2) for prompt in prompts]
    # Padding on the left changes no answer.
    assert together == [completion for completions in apart for completion in completions]


# ---- random states --------------------------------------------------------------------------------------------------
def test_the_same_seed_gives_the_same_samples_whatever_was_drawn_before():
    agent = agent_of()
    torch.manual_seed(1)
    first = generate(agent, seed=11)
    torch.manual_seed(2)
    torch.rand(17)
    assert generate(agent, seed=11) == first
    assert generate(agent, seed=12) != first


def test_the_global_random_state_is_untouched():
    agent = agent_of()
    torch.manual_seed(4)
    before = torch.random.get_rng_state()
    generate(agent)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_agent_step_process_and_purpose_has_a_seed_of_its_own():
    agents = [agent_of(name) for name in ("a", "b")]
    agents.append(agent_of("a", args=run_config(max_completion_length=8, seed=7)))
    seeds = [
        agent.sampling_seed(mode, step, process)
        for agent in agents
        for mode in ("train", "eval")
        for step in (0, 1, 11)
        for process in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    # The same in every run, and torch takes it.
    assert agents[0].sampling_seed("train", 3, 1) == agent_of("a").sampling_seed("train", 3, 1)
    torch.Generator().manual_seed(max(seeds))


def test_other_agents_draw_other_samples_from_the_same_policy():
    one, other = agent_of("one"), agent_of("other")
    assert torch.equal(one.policy.lm_head.weight, other.policy.lm_head.weight)
    samples = [generate(agent, agent.sampling_seed("train", 0, 0)) for agent in (one, other)]
    assert samples[0] != samples[1]


def test_an_agents_samples_do_not_depend_on_the_others():
    one, other, accelerator = agent_of("one"), agent_of("other"), Accelerator(cpu=True)
    requests = {"one": GenerationRequest(PROMPTS, 4, 21), "other": GenerationRequest(PROMPTS[:1], 4, 22)}
    agents = {"other": other, "one": one}
    backend = TransformersGeneration(agents, lambda name: (accelerator, agents[name].policy), True)
    together = backend.generate({"other": requests["other"], "one": requests["one"]})
    assert together == backend.generate(requests)
    assert together == {"one": generate(one, 21), "other": generate(other, 22, PROMPTS[:1])}


@pytest.mark.parametrize("training", [True, False])
def test_the_policy_is_left_in_its_mode_and_samples_without_dropout(training):
    policy = tiny_policy(len(WORDS))
    expected = generate(agent_of(policy=policy), seed=5)
    for layer in policy.model.layers:
        layer.self_attn.attention_dropout = 0.9
    policy.train(training)
    assert generate(agent_of(policy=policy), seed=5) == expected
    assert policy.training is training and all(module.training is training for module in policy.modules())


# ---- adapters -------------------------------------------------------------------------------------------------------
def test_a_peft_policy_samples_with_its_adapter_and_explicit_settings():
    base = tiny_policy(len(WORDS))
    expected = by_hand(base, 5, 1.0, [END])
    for key, value in MISCHIEF.items():
        setattr(base.generation_config, key, value)
    policy = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    agent = agent_of(policy=policy)
    # A fresh adapter changes nothing.
    assert generate(agent, seed=5) == expected
    assert policy.get_base_model().generation_config.suppress_tokens == MISCHIEF["suppress_tokens"]
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=3.0)
    trained = generate(agent, seed=5)
    assert trained != expected and trained == by_hand(policy, 5, 1.0, [END])


# ---- metrics --------------------------------------------------------------------------------------------------------
def test_lengths_are_logged(monkeypatch):
    metrics = Metrics()
    log_completions(
        metrics, "a", [Completion((5, 1), "stop"), Completion((5, 6, 7, 8), "length"), Completion((1,), "stop")]
    )
    log_completions(metrics, "a", [Completion((5, 6, 7, 8, 9), "length")])
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: objects)
    assert metrics.reduce() == {
        "a/completions/mean_length": 3.0,  # (2 + 4 + 1 + 5) / 4
        "a/completions/min_length": 1.0,
        "a/completions/max_length": 5.0,
        "a/completions/mean_terminated_length": 1.5,  # (2 + 1) / 2
        "a/completions/clipped_ratio": 0.5,
        "a/tokens/generated": 12.0,
    }
