"""Two processes under a real launcher, over gloo, against one process: DDP, FSDP2 and DeepSpeed."""

import json

import launched
import pytest
import tiny
import torch
from launching import launch_well
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from hacpo_trl.embedded import conv_dataset


# DDP and FSDP2 in every run of the tests; DeepSpeed in `make test-distributed`.
DDP = pytest.param("cpu_2proc", marks=pytest.mark.distributed, id="ddp")
FSDP2 = pytest.param("fsdp2", marks=pytest.mark.distributed, id="fsdp2")
ZERO1, ZERO2, ZERO3 = (
    pytest.param(config, marks=pytest.mark.deepspeed, id=config[:5]) for config in ("zero1", "zero2_cpu", "zero3_cpu")
)
BACKENDS = [DDP, FSDP2, ZERO1, ZERO2, ZERO3]


def save_policies(folder):
    """The initial policies of a run."""
    for name in ("qwen", "llama"):
        tiny.policy(name).save_pretrained(folder / "policies" / name)


def save_judge(folder):
    """A reward model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tiny.tokenizer("qwen")), num_labels=1, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    tiny.tokenizer("qwen").save_pretrained(folder / "judge")


# What each backend runs, in one launch: imports take longer than updates.
SCENARIOS = {
    "cpu_2proc": "updates,dropped,resume,evaluate",
    "fsdp2": "updates,dropped,resume,reward_model",
    "zero1": "updates,resume",
    "zero2_cpu": "updates,resume",
    "zero3_cpu": "updates,dropped,resume,reward_model",
}


@pytest.fixture(scope="module")
def backend(request):
    """The name of a launch configuration."""
    return request.param


@pytest.fixture(scope="module")
def ran(repository, tmp_path_factory, backend):
    """The folder that a backend's scenarios have filled."""
    folder = tmp_path_factory.mktemp(backend)
    save_policies(folder)
    save_judge(folder)
    launch_well(repository, backend, SCENARIOS[backend], folder)
    return folder


def logs(path):
    return [log for log in json.loads(path.read_text()) if "loss" in log]


def logs_of(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_two_processes_make_the_same_updates_as_one(ran, tmp_path):
    for order in ("mixed", "self_first"):
        one = tiny.trainer(tmp_path, minibatch_order=order, **tiny.PLAIN_SGD)
        start = {name: tiny.parameters(one, name).clone() for name in one.agents}
        one.train()
        expected_logs = logs_of(one)
        for cut in ("4x1", "2x2"):
            state = torch.load(ran / f"{order}-{cut}.pt", weights_only=True)
            for name in one.agents:
                assert (state[name] - start[name]).abs().max() > 1e-3
                torch.testing.assert_close(state[name], tiny.parameters(one, name), rtol=0, atol=1e-6)
            for log, expected in zip(logs(ran / f"{order}-{cut}.json"), expected_logs, strict=True):
                assert log["loss"] == pytest.approx(expected["loss"], abs=1e-6)
                assert log.keys() == expected.keys()
                for key in expected:
                    if not key.startswith(("time/", "epoch")):
                        assert log[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_shrinkage_baseline_is_fitted_over_all_processes(ran, tmp_path):
    one = tiny.trainer(tmp_path, advantage_baseline="shrinkage", reward_funcs=tiny.uneven_reward, **tiny.PLAIN_SGD)
    one.train()
    state = torch.load(ran / "shrinkage.pt", weights_only=True)
    for name in one.agents:
        torch.testing.assert_close(state[name], tiny.parameters(one, name), rtol=0, atol=1e-6)
    weights = [
        [
            log[f"{name}/baseline_own_weight"]
            for name in one.agents
            for log in of_run
            if f"{name}/baseline_own_weight" in log
        ]
        for of_run in (logs(ran / "shrinkage.json"), logs_of(one))
    ]
    assert weights[0] == pytest.approx(weights[1]) and any(0 < weight < 1 for weight in weights[0])


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_learning_rate_clipping_and_schedule_are_an_agents_own(ran, tmp_path):
    own = tiny.trainer(tmp_path, **{**tiny.PLAIN_SGD, **tiny.OWN_SETTINGS})
    own.train()
    state = torch.load(ran / "own.pt", weights_only=True)
    shared = torch.load(ran / "mixed-4x1.pt", weights_only=True)
    for name in own.agents:
        torch.testing.assert_close(state[name], tiny.parameters(own, name), rtol=0, atol=1e-6)
        assert (state[name] - shared[name]).abs().max() > 1e-3
    expected_logs = logs_of(own)
    for log, expected in zip(logs(ran / "own.json"), expected_logs, strict=True):
        for name, limit in (("qwen", 0.5), ("llama", 0.25)):
            assert log[f"{name}/grad_norm"] == pytest.approx(expected[f"{name}/grad_norm"], rel=1e-4)
            assert log[f"{name}/grad_norm"] > limit
    rates = [[log[f"{name}/learning_rate"] for log in logs(ran / "own.json")] for name in ("qwen", "llama")]
    # Linear from 0.6 to 0 in 3 updates; two updates of warm-up to 0.2.
    assert rates == [pytest.approx([0.6, 0.4, 0.2]), pytest.approx([0.0, 0.1, 0.2])]


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_adapters_and_reference_policies_work_alike(ran, tmp_path):
    settings = {"models": launched.models(ran), "beta": 0.5, **tiny.PLAIN_SGD}
    one = tiny.trainer(tmp_path, **settings, **tiny.adapter())
    start = tiny.parameters(one, "llama").clone()
    one.train()
    state = torch.load(ran / "adapter.pt", weights_only=True)
    assert (state["llama"] - start).abs().max() > 1e-3
    for name in one.agents:
        torch.testing.assert_close(state[name], tiny.parameters(one, name), rtol=0, atol=1e-6)
    for log, expected in zip(logs(ran / "adapter.json"), logs_of(one), strict=True):
        for name in one.agents:
            assert log[f"{name}/kl"] == pytest.approx(expected[f"{name}/kl"], rel=1e-3, abs=1e-7)

    if (ran / "trained-again.pt").exists():
        one.train()
        state = torch.load(ran / "trained-again.pt", weights_only=True)
        for name in one.agents:
            torch.testing.assert_close(state[name], tiny.parameters(one, name), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", [DDP, FSDP2, ZERO3], indirect=True)
def test_a_process_without_usable_peer_rollouts_does_not_hang(ran):
    for order in ("mixed", "self_first"):
        first = logs(ran / f"dropped-{order}.json")[0]
        # Half of the peer's 8 rollouts: those of the second process.
        assert first["qwen/dropped/undecodable"] == 4


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_resume_within_a_step_is_bit_identical(ran):
    """Sampled for real, which gathers sharded weights; what save_model writes are the trained weights."""
    whole, again = (torch.load(ran / f"{run}.pt", weights_only=True) for run in ("whole", "resumed"))
    for name in whole:
        assert torch.equal(whole[name], again[name])
    runs = [
        [{k: v for k, v in log.items() if not k.startswith("time/")} for log in logs(ran / f"{run}.json")]
        for run in ("whole", "resumed")
    ]
    assert runs[0] == runs[1]

    for name in whole:
        saved = AutoModelForCausalLM.from_pretrained(ran / "saved" / name)
        assert torch.equal(torch.cat([p.flatten() for p in saved.parameters()]), whole[name])


@pytest.mark.parametrize("backend", [DDP, FSDP2], indirect=True)
def test_resume_by_another_number_of_processes(repository, backend, ran):
    """Between two steps it makes the same updates, optimizer states and adapters included; within one it says why
    not."""
    if backend == "cpu_2proc":
        launched.resume_alone(ran)
    else:
        launch_well(repository, backend, "resume_alone", ran, processes=1)
    two, one = (torch.load(ran / f"{run}.pt", weights_only=True) for run in ("scripted", "alone-checkpoint-2"))
    for name in two:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    error = (ran / "alone-checkpoint-1.txt").read_text()
    assert "1 updates into a step of 2" in error
    assert "over 2 processes; this run has 1" in error


@pytest.mark.parametrize("backend", [ZERO2, ZERO3], indirect=True)
def test_deepspeed_says_that_another_number_of_processes_cannot_resume(repository, backend, ran):
    launch_well(repository, backend, "resume_alone", ran, processes=1)
    stage = f"ZeRO-{backend[4]}"
    for checkpoint in ("checkpoint-2", "checkpoint-1"):
        error = (ran / f"alone-{checkpoint}.txt").read_text()
        assert str(ran / "scripted" / checkpoint) in error
        assert f"saved under {stage} (processes: 2); this run is under {stage} (processes: 1)" in error


@pytest.mark.parametrize("backend", [DDP], indirect=True)
def test_evaluation_counts_every_prompt_once(ran, tmp_path):
    two = json.loads((ran / "evaluate.json").read_text())
    one = tiny.trainer(tmp_path, eval_dataset=conv_dataset("test", 5)).evaluate()
    for key in one:
        if "reward" in key:
            assert two[key] == pytest.approx(one[key]), key


@pytest.mark.parametrize("backend", [FSDP2, ZERO3], indirect=True)
def test_a_reward_model_scores_alike(ran, tmp_path):
    """ZeRO-3 deals out every model that is loaded, reward models too; FSDP2 may load models on one process alone."""
    one = tiny.trainer(tmp_path, reward_funcs=[str(ran / "judge"), tiny.partial_reward], max_steps=2)
    one.train()
    first, expected = logs(ran / "reward_model.json")[0], one.state.log_history[0]
    for name in one.agents:
        for key in (f"{name}/rewards/judge/mean", f"{name}/rewards/judge/std", f"{name}/reward"):
            assert first[key] == pytest.approx(expected[key], abs=1e-6)
