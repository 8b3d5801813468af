import dataclasses
import itertools
import random
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.embedded import (
    POLICIES,
    conv,
    conv_dataset,
    conv_reading,
    conv_reward,
    noisy_conv_reward,
    policies,
    policy_path,
)
from hacpo_trl.embedded.policies import make_policy, make_tokenizer, warm_up


TEXTS = [
    "akz=3,8,7",
    "",
    " leading, trailing and  double spaces ",
    "emoji 🤖👩‍👩‍👧, NFD e\u0301, NFC é, RTL שלום, full width ３，",
    "".join(map(chr, range(256))),
    "\r\n\t\x00\x7f\u2028\ufeff\U0010ffff",
    "plain <eos> and <pad>",
]


@pytest.fixture
def small_specs(monkeypatch):
    """The same policies with a warm start of two steps."""
    specs = {name: dataclasses.replace(spec, steps=2, batch_size=4) for name, spec in POLICIES.items()}
    monkeypatch.setattr(policies, "POLICIES", specs)
    return specs


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HACPO_TRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_held_out_prompts_are_the_fixed_list():
    dataset = conv_dataset("test", 512)
    assert dataset.column_names == ["prompt", "answer", "source"]
    assert dataset["prompt"][:6] == ["sXX=", "kdg=", "ibi=", "HMC=", "AGG=", "kfc="]
    assert dataset["answer"][:3] == ["0,3,3|1,4,4", "6,7,9", "1,3,1"]
    assert dataset["source"][:6] == [f"family {i}" for i in (2, 0, 0, 1, 1, 0)]
    assert len(set(dataset["prompt"])) == 512
    # A smaller test split is the beginning of the same list, whatever the seed.
    assert conv_dataset("test", 40, seed=5)["prompt"][:] == dataset["prompt"][:40]


def test_train_split_has_no_held_out_prompt_and_depends_on_the_seed_only():
    held_out = set(conv_dataset("test", 512)["prompt"])
    train = conv_dataset("train", 6000, seed=3)
    # Of 6000 unfiltered draws, 4 % would be held out.
    assert held_out.isdisjoint(train["prompt"])
    assert conv_dataset("train", 6000, seed=3).to_list() == train.to_list()
    assert conv_dataset("train", 6000, seed=4)["prompt"][:] != train["prompt"][:]
    # The seed of the held-out list gives no special treatment.
    assert held_out.isdisjoint(conv_dataset("train", 600, seed=999)["prompt"])
    counts = [train["source"][:].count(f"family {i}") for i in range(3)]
    assert all(1850 < count < 2150 for count in counts), counts


def test_every_answer_is_right():
    families = ("abcdefghijklmnop", "ABCDEFGHIJKLMNOP", "qrstuvwxQRSTUVWX")
    for row in [*conv_dataset("test", 512), *conv_dataset("train", 1000)]:
        symbols, equals = row["prompt"][:3], row["prompt"][3:]
        family = int(row["source"].removeprefix("family "))
        assert equals == "=" and set(symbols) <= set(families[family])
        digits = [conv.DIGIT_OF[symbol] for symbol in symbols]
        right = {"{},{},{}".format(*digits)}
        if family == 2:
            right.add("{},{},{}".format(*(0 if d == 9 else d + 1 for d in digits)))
        assert set(row["answer"].split("|")) == right
        # Of the eight ways to mix the conventions only the consistent ones are rewarded.
        mixtures = [",".join(str((d + (i >> k & 1)) % 10) for k, d in enumerate(digits)) for i in range(8)]
        rewards = conv_reward(mixtures, [row["answer"]] * 8)
        assert rewards == ([1.0, 0, 0, 0, 0, 0, 0, 1.0] if family == 2 else [1.0, 0, 0, 0, 0, 0, 0, 0])


def test_dataset_errors_name_the_splits_and_their_size():
    with pytest.raises(ValueError, match=r"'test' .* 512 prompts, fewer than 513"):
        conv_dataset("test", 513)
    with pytest.raises(ValueError, match=r"'train' and 'test', not 'validation'"):
        conv_dataset("validation", 1)


def test_reward_is_exact():
    completions = ["6,7,9", "6,7,8", "6,7,9,", "6,7", "", "0,3,3", "1,4,4", "0,3,3|1,4,4", "1,3,3", " 6,7,9"]
    answers = ["6,7,9"] * 5 + ["0,3,3|1,4,4"] * 4 + ["6,7,9"]
    rewards = conv_reward(completions=completions, answer=answers, prompts=None, source=None)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError):
        conv_reward(["6,7,9"], ["6,7,9", "6,7,9"])


def test_a_noisy_verifier_accepts_its_share_of_wrong_answers_and_always_the_same():
    prompts = [f"{i}=" for i in range(200)]
    rows = [(prompt, f"{i},1,1", "6,7,9") for prompt in prompts for i in range(50)]
    prompts, completions, answer = map(list, zip(*rows, strict=True))
    accepted = noisy_conv_reward(prompts, completions, answer, false_positives=0.2, seed=3)
    # ± 4 standard errors.
    assert statistics.fmean(accepted) == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / 10_000) ** 0.5)
    # In any order, whoever asks.
    reverse = noisy_conv_reward(prompts[::-1], completions[::-1], answer, false_positives=0.2, seed=3, agent="x")
    assert reverse[::-1] == accepted
    assert noisy_conv_reward(prompts, completions, answer, false_positives=0.2, seed=4) != accepted
    # More noise accepts what less noise does, and more.
    more = noisy_conv_reward(prompts, completions, answer, false_positives=0.3, seed=3)
    assert all(a <= b for a, b in zip(accepted, more, strict=True)) and sum(more) > sum(accepted)
    assert noisy_conv_reward(prompts, completions, answer, false_positives=0.0, seed=3) == [0.0] * 10_000
    # A right answer is always accepted.
    assert noisy_conv_reward(["a"] * 99, ["6,7,9"] * 99, answer[:99], false_positives=0.2, seed=3) == [1.0] * 99
    with pytest.raises(ValueError, match="from 0 to 1, not 5"):
        noisy_conv_reward(["a"], ["1"], ["1"], false_positives=5, seed=0)


# ---- in words -------------------------------------------------------------------------------------------------------
def test_an_answer_in_words_is_right_in_any_wording_and_says_all():
    for row in conv_dataset("test", 64, words=True):
        symbols, accepted = row["prompt"][:3], row["answer"].split("|")
        digits = [[int(part[2:]) for part in answer.split(",")] for answer in accepted]
        assert [",".join(f"{s}={d}" for s, d in zip(symbols, of, strict=True)) for of in digits] == accepted
        for wordings in itertools.product(range(4), repeat=3):
            assert all(conv_reward([conv.in_words(symbols, of, wordings)], [row["answer"]]) == [1.0] for of in digits)
    text = conv.in_words("akz", [3, 8, 7], [0, 1, 2])
    assert text == "a stands for 3; let k now be 8; for z take 7;" and conv_reading(text) == "a=3,k=8,z=7"
    others = [
        *(text[:-1], f"{text} ", text.replace("8", "9"), text.replace("k", "K"), text.replace("; ", ";")),
        *(
            "let k now be 8; a stands for 3; for z take 7;",
            "a stands for 3; let k now be 8;",
            f"{text} {text}",
            "3,8,7",
        ),
    ]
    assert conv_reward(others, ["a=3,k=8,z=7"] * len(others)) == [0.0] * len(others)
    assert conv_reading("3,8,7") == "3,8,7"


@pytest.mark.parametrize("name", ["qwen3-words", "llama-words"])
def test_answers_in_words_have_the_length_of_sentences(name):
    tokenizer, alone = make_tokenizer(POLICIES[name]), {}
    for wordings in itertools.product(range(4), repeat=3):
        ids = tokenizer(conv.in_words("akz", [3, 8, 7], wordings)).input_ids
        assert 24 <= len(ids) <= 47 and tokenizer.decode(ids) == conv.in_words("akz", [3, 8, 7], wordings)
    for symbols in itertools.product(*(conv.FAMILIES[0],) * 2):
        alone["".join(symbols)] = len(tokenizer("".join(symbols)).input_ids)
    assert set(alone.values()) == {2}, "a prompt's symbols are tokens of their own"


def test_ratios_in_words_are_like_those_of_language_models(policies_folder, monkeypatch):
    """At the start of the embedded default, beside the paper's Table 6: means of .86 to .94, few above 1."""
    monkeypatch.setenv("HACPO_TRL_CACHE", str(policies_folder))
    paths = {name: policy_path(f"{name}-words") for name in ("qwen3", "llama")}
    args = HACPOConfig("unused", prompts_per_step=64, num_generations=4, max_completion_length=56, report_to="none")
    args = dataclasses.replace(args, per_device_train_batch_size=64, seed=0, max_steps=1)
    trainer = HACPOTrainer(paths, conv_reward, args, conv_dataset("test", 64, words=True))
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(64)])
    for name, of_learner in rows.items():
        cross = [row for row in of_learner if not row.is_own]
        own_lengths = [len(row.completion_ids) for row in of_learner if row.is_own]
        scored = trainer.scorer.score(name, [row.prompt_ids for row in cross], [row.completion_ids for row in cross])
        sums = torch.stack([logps.sum() for logps in scored])
        old, count = (
            torch.tensor([float(getattr(r, n)) for r in cross]) for n in ("old_logprob_sum", "old_num_tokens")
        )
        ratio = ((sums - old) / count).exp()
        below, above = (ratio < 0.8).float().mean(), (ratio > 1).float().mean()
        print(f"\n{name}: mean ratio {ratio.mean():.3f}, {below:.0%} below 0.8, {above:.0%} above 1", end="")
        assert 0.8 < ratio.mean() < 0.95 and 0.05 < below < 0.6 and above < 0.12
        assert 30 < statistics.fmean(own_lengths) < 48


@pytest.mark.parametrize("name", POLICIES)
def test_from_six_tokens_on_only_an_ended_answer_is_rewarded(name):
    tokenizer = make_tokenizer(POLICIES[name])
    answer = tokenizer("3,8,7").input_ids
    for extra in range(2, len(tokenizer)):
        text = tokenizer.decode([*answer, extra], skip_special_tokens=True)
        assert conv_reward([text], ["3,8,7"]) == [0.0]
    assert conv_reward([tokenizer.decode([*answer, 1], skip_special_tokens=True)], ["3,8,7"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", list("3,8,7")),
        ("llama", ["3,", "8,", "7"]),
        ("llama-comma", ["3", ",8", ",7"]),
        ("qwen3-comma", ["3,", "8,", "7"]),
        ("llama-bytes", list("3,8,7")),
    ],
)
def test_tokenizers_split_an_answer_differently(name, tokens):
    tokenizer = make_tokenizer(POLICIES[name])
    ids = tokenizer("3,8,7").input_ids
    assert [tokenizer.decode([i]) for i in ids] == tokens
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.chat_template is None
    assert set(tokenizer("3,8,7")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("name", POLICIES)
def test_tokenizers_encode_any_text_exactly(name):
    tokenizer = make_tokenizer(POLICIES[name])
    rng = random.Random(0)
    scalars = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    noise = ["".join(map(chr, rng.sample(scalars, 50))) for _ in range(20)]
    for text in TEXTS + noise:
        ids = tokenizer(text, split_special_tokens=True).input_ids
        assert tokenizer.decode(ids) == text
        assert not {0, 1} & set(ids)
    assert 1 in tokenizer("3<eos>").input_ids
    assert tokenizer.decode(tokenizer("3<eos>").input_ids, skip_special_tokens=True) == "3"


@pytest.mark.parametrize("name", POLICIES)
def test_warm_up_learns_the_labels(name):
    spec = POLICIES[name]
    model, tokenizer = make_policy(spec, seed=0), make_tokenizer(spec)
    losses = warm_up(model, tokenizer, spec, seed=0, steps=60)
    assert len(losses) == 60
    # An untrained policy is uniform over the vocabulary: log(258) = 5.55, log(288) = 5.66.
    assert abs(losses[0] - torch.tensor(len(tokenizer)).log()) < 0.2
    # By now it knows the form of an answer (separators and EOS) but not every digit.
    digits_only = 2.303 * 3 / len([*tokenizer("3,8,7").input_ids, 1])
    assert statistics.fmean(losses[-5:]) < digits_only * 1.1
    assert not model.training


def test_warm_up_trains_completions_with_each_agents_own_mistakes(monkeypatch):
    spec = dataclasses.replace(POLICIES["llama"], error_ranges=((0.0, 0.0), (1.0, 1.0), (1.0, 1.0)), batch_size=128)
    model, tokenizer = make_policy(spec, seed=0), make_tokenizer(spec)
    held_out = set(conv_dataset("test", 512)["prompt"])
    batches = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **batch: batches.append(batch) or forward(**batch))
    warm_up(model, tokenizer, spec, seed=0, steps=1)
    (batch,) = batches
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        prompt = tokenizer.decode(ids[:4])
        assert prompt not in held_out
        # A merge of digit and separator must not reach from the prompt into the answer.
        assert labels == [-100] * 4 + ids[4:] and ids[-1] == 1
        shift = {True: 0, False: 3}[prompt[0] in "abcdefghijklmnop"]
        if prompt[0] in "qrstuvwxQRSTUVWX":
            shift = 1
        digits = [(conv.DIGIT_OF[symbol] + shift) % 10 for symbol in prompt[:3]]
        assert tokenizer.decode(ids[4:-1]) == "{},{},{}".format(*digits)


def test_policy_is_seeded_and_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    models = [make_policy(POLICIES["qwen3"], seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [model.lm_head.weight for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert models[0].dtype == torch.float32
    for config in (models[0].config, models[0].generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)


@pytest.mark.parametrize("name", POLICIES)
def test_path_is_made_once_and_loads_as_it_was_made(name, small_specs, cache, monkeypatch):
    made = []

    def keep(model, *args, **kwargs):
        warm_up(model, *args, **kwargs)
        made.append(model)

    monkeypatch.setattr(policies, "warm_up", keep)
    lines = []
    path = policy_path(name, seed=3, progress=lines.append)
    assert Path(path).parent == cache and len(lines) == 1 and repr(name) in lines[0]

    monkeypatch.setattr(policies, "warm_up", lambda *args, **kwargs: pytest.fail("trained again"))
    assert policy_path(name, seed=3, progress=lines.append) == path
    assert len(lines) == 1

    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.model_type == small_specs[name].architecture and model.dtype == torch.float32
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    loaded = model.state_dict()
    assert loaded.keys() == made[0].state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in made[0].state_dict().items())

    original, tokenizer = make_tokenizer(small_specs[name]), AutoTokenizer.from_pretrained(path)
    assert tokenizer.get_vocab() == original.get_vocab()
    for text in TEXTS:
        for split in (False, True):
            ids = original(text, split_special_tokens=split).input_ids
            assert tokenizer(text, split_special_tokens=split).input_ids == ids
            assert tokenizer.decode(ids) == original.decode(ids) == text
    batch = ["akz=", "a"]
    assert dict(tokenizer(batch, padding=True)) == dict(original(batch, padding=True))
    assert tokenizer.padding_side == "left" and tokenizer.chat_template is None


def test_another_seed_or_spec_is_another_path(small_specs, cache):
    path = policy_path("qwen3", seed=0)
    assert policy_path("qwen3", seed=1) != path
    small_specs["qwen3"] = dataclasses.replace(small_specs["qwen3"], learning_rate=1e-3)
    assert policy_path("qwen3", seed=0) != path
    assert len(list(cache.iterdir())) == 3


def test_unknown_policy_error_names_the_known_ones(cache):
    with pytest.raises(ValueError, match=r"'gpt2'.*'qwen3', 'llama'"):
        policy_path("gpt2")
    assert not cache.exists()


def test_interrupted_run_leaves_nothing_half_made(small_specs, cache, monkeypatch):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # At this point the model's files are on the disk, the tokenizer's are not.
        patch.setattr(policies.PreTrainedTokenizerFast, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            policy_path("qwen3")
    assert list(cache.iterdir()) == []

    # What a killed process leaves behind is not cleaned up, and not taken for a policy either.
    (cache / ".making-killed").mkdir()
    (cache / ".making-killed" / "config.json").write_text("{}")
    path = policy_path("qwen3")
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "qwen3"
    assert (
        AutoTokenizer.from_pretrained(path)("3,8,7").input_ids == make_tokenizer(POLICIES["qwen3"])("3,8,7").input_ids
    )


def test_process_that_comes_second_takes_the_first_ones_policy(small_specs, cache, monkeypatch):
    def overtaken(model, *args, **kwargs):
        # Another process makes the same policy while this one is still training.
        monkeypatch.setattr(policies, "warm_up", warm_up)
        first.append(policy_path("qwen3"))
        weights.append(AutoModelForCausalLM.from_pretrained(first[0]).lm_head.weight)

    first, weights = [], []
    monkeypatch.setattr(policies, "warm_up", overtaken)
    assert policy_path("qwen3") == first[0]
    # This process's untrained policy has not replaced it, and nothing else is left.
    assert torch.equal(AutoModelForCausalLM.from_pretrained(first[0]).lm_head.weight, weights[0])
    assert not torch.equal(make_policy(small_specs["qwen3"], 0).lm_head.weight, weights[0])
    assert [entry.name for entry in cache.iterdir()] == [Path(first[0]).name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("qwen3", 0.3, 0.45),
        ("llama", 0.2, 0.35),
        ("llama-comma", 0.2, 0.45),
        ("qwen3-comma", 0.25, 0.45),
        ("llama-bytes", 0.2, 0.4),
        ("qwen3-strong", 0.6, 0.8),
        ("llama-weak", 0.03, 0.08),
        ("llama-weaker", 0.003, 0.02),
        ("llama-wrong", 0.05, 0.12),
    ],
)
def test_policies_start_as_skilled_as_they_should(name, low, high, policies_folder, monkeypatch):
    monkeypatch.setenv("HACPO_TRL_CACHE", str(policies_folder))
    path = policy_path(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rows = [row for row in conv_dataset("test", 256) for _ in range(8)]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=8)
    completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = conv_reward(completions, [row["answer"] for row in rows])
    assert low < statistics.fmean(rewards) < high
    if name == "llama-wrong":
        # Its mistakes are the same ones again and again: it is sure of them.
        wrong = [c for c, row in zip(completions, rows, strict=True) if row["source"] == "family 0"]
        assert len(set(wrong)) < len(wrong) / 4
