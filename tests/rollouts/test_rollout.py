import dataclasses
import json

import pytest
from tiny_agents import run_config

from hacpo_trl.rollouts.exchange import exchange
from hacpo_trl.rollouts.rollout import LearnerView, Rollout


def rollout_of(**values):
    defaults = {
        "agent": "qwen",
        "prompt": "1 + 1 =",
        "prompt_index": 3,
        "completion_ids": (17, 151645),
        "text": "2",
        "decodable": True,
        "finish_reason": "stop",
        "logprob_sum": -0.5,
        "reward": 1.0,
        "policy_version": 12,
    }
    return Rollout(**{**defaults, **values})


@pytest.mark.parametrize(
    "values",
    [
        {},
        # Floats whose decimal forms are long, tiny, huge or signed zeros.
        {"logprob_sum": -0.1 - 0.2, "reward": 1 / 3},
        {"logprob_sum": -5e-324, "reward": -1.7976931348623157e308},
        {"logprob_sum": -0.0, "reward": 0.0},
        {"reward": None},
        {"text": 'é e\u0301 🤖 \u2028 \x00 "\\" \n\t</think>\ufffd'},
        {"text": "", "completion_ids": (), "finish_reason": "length", "decodable": False},
        {"prompt": [{"role": "system", "content": "Ë"}, {"role": "user", "content": "1 + 1 ="}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}], "tool_calls": None}]},
    ],
)
def test_a_rollout_survives_json_exactly(values):
    rollout = rollout_of(**values)
    line = rollout.to_json()
    assert "\n" not in line
    back = Rollout.from_json(line)
    assert back == rollout
    assert isinstance(back.completion_ids, tuple)
    # Equality takes -0.0 for 0.0; its sign survives, too.
    assert repr(back) == repr(rollout)


def test_json_holds_nothing_but_the_record():
    assert set(json.loads(rollout_of().to_json())) == {field.name for field in dataclasses.fields(Rollout)}


def test_an_unknown_field_is_not_swallowed():
    record = {**json.loads(rollout_of().to_json()), "hidden": 1}
    with pytest.raises(TypeError, match="hidden"):
        Rollout.from_json(json.dumps(record))


def test_num_tokens_counts_the_stop_token():
    assert rollout_of().num_tokens == 2 and rollout_of(completion_ids=()).num_tokens == 0


def test_a_rollout_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout_of().reward = 2.0


class RecordingAgent:
    """Stands for an agent; hands its views out and remembers what it was shown."""

    def __init__(self, name):
        self.name = name
        self.shown = []

    def view(self, rollouts, prompt_ids):
        self.shown.append([rollout.agent for rollout in rollouts])
        return [LearnerView(r, tuple(prompt_ids[r.prompt_index]), r.completion_ids, None) for r in rollouts]


def exchanged(names, share=True):
    agents = {name: RecordingAgent(name) for name in names}
    rollouts = {name: [rollout_of(agent=name, prompt_index=i) for i in (0, 0, 1, 1)] for name in names}
    prompt_ids = {name: [[ord(name[0]), 0], [ord(name[0]), 1]] for name in names}
    return agents, exchange(rollouts, prompt_ids, agents, share)


@pytest.mark.parametrize("names", [("zeta", "beta", "mu"), ("mu", "zeta", "beta"), ("beta", "mu", "zeta")])
def test_own_rollouts_come_first_and_peers_by_name_however_agents_are_listed(names):
    _, views = exchanged(names)
    assert {learner: list(of_learner) for learner, of_learner in views.items()} == {
        "beta": ["beta", "mu", "zeta"],
        "mu": ["mu", "beta", "zeta"],
        "zeta": ["zeta", "beta", "mu"],
    }


def test_each_learner_sees_its_own_prompt_ids_and_each_source_apart():
    agents, views = exchanged(("a", "b"))
    assert agents["a"].shown == [["a"] * 4, ["b"] * 4]
    of_peer = views["a"]["b"]
    assert [view.rollout.agent for view in of_peer] == ["b"] * 4
    assert [view.prompt_ids for view in of_peer] == [(97, 0), (97, 0), (97, 1), (97, 1)]
    assert [view.prompt_ids for view in views["b"]["b"]] == [(98, 0), (98, 0), (98, 1), (98, 1)]


def test_without_sharing_a_learner_gets_its_own_rollouts_only():
    assert run_config(algorithm="gspo").shares_rollouts is False
    _, views = exchanged(("b", "a"), share=False)
    assert {learner: list(of_learner) for learner, of_learner in views.items()} == {"b": ["b"], "a": ["a"]}
