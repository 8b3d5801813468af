"""Format rewards, also where the chat template has opened the think tag."""

import pytest

from hacpo_trl.rewards import ThinkFormatReward, boxed_format_reward, think_format_reward


@pytest.mark.parametrize(
    ("completion", "plain", "opened"),
    [
        ("<think>\n2 + 2\n</think>\nIt is 4.", 1.0, 0.0),
        ("\n<think>2 + 2</think>4", 1.0, 0.0),
        ("2 + 2\n</think>\nIt is 4.", 0.0, 1.0),
        ("<think>2 + 2\nIt is 4.", 0.0, 0.0),
        ("It is 4.", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<think>2 + 2</think>", 0.0, 0.0),
        ("2 + 2</think>\n", 0.0, 0.0),
        ("<think> </think>It is 4.", 0.0, 0.0),
        ("</think>It is 4.", 0.0, 0.0),
        ("Well. <think>2 + 2</think>It is 4.", 0.0, 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0, 0.0),
        ("<think>a</think>b</think>c", 0.0, 0.0),
        ("a</think>b</think>c", 0.0, 0.0),
        ("<think><think>a</think>b", 0.0, 0.0),
    ],
)
def test_think_tags(completion, plain, opened):
    assert think_format_reward([completion]) == [plain]
    assert think_format_reward([completion], prompts=["2 + 2?"]) == [plain]
    assert think_format_reward([completion], prompts=["<|user|>2 + 2?<|assistant|><think>\n"]) == [opened]
    messages = [[{"role": "assistant", "content": completion}]]
    user = {"role": "user", "content": "What does <think> mean? <think>"}
    assert think_format_reward(messages, prompts=[[user]]) == [plain]
    assert think_format_reward(messages, prompts=[[user, {"role": "assistant", "content": "<think>"}]]) == [opened]
    assert ThinkFormatReward(opened_by_template=True)(messages, prompts=[[user]]) == [opened]
    assert ThinkFormatReward(opened_by_template=False)([completion], prompts=["<think>"]) == [plain]


def test_each_prompt_decides_for_its_own_completion():
    completions = ["a</think>b", "a</think>b", "<think>a</think>b"]
    assert think_format_reward(completions, prompts=["x<think>", "x", "x"]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        think_format_reward(completions, prompts=["x"])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"It is \boxed{4}.", 1.0),
        (r"It is \boxed{\frac{1}{2}}.", 1.0),
        (r"<think>\boxed{5}?</think>It is \boxed{4}.", 1.0),
        (r"<think>Is it \boxed{4}?</think>It is 4.", 0.0),
        (r"It is \boxed{4", 0.0),
        (r"It is \boxed{ }.", 0.0),
        (r"\boxed{4} or \boxed{5", 0.0),
        ("It is 4.", 0.0),
    ],
)
def test_boxed_answer(completion, expected):
    assert boxed_format_reward([completion]) == [expected]
    assert boxed_format_reward([[{"role": "assistant", "content": completion}]], prompts=["?"]) == [expected]


def test_names_under_which_rewards_are_logged():
    assert think_format_reward.__name__ == "think_format_reward"
    assert boxed_format_reward.__name__ == "boxed_format_reward"
