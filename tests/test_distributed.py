"""Two processes under a real launcher (DDP over gloo) against one process."""

import json
import os
import socket
import subprocess
import sys

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from hacpo_trl.miniature import conv_dataset


# Plain DDP in every run of the tests; DeepSpeed in `make test-distributed`.
BACKENDS = [
    pytest.param("cpu_2proc", marks=pytest.mark.distributed, id="ddp"),
    pytest.param("fsdp2_cpu", marks=pytest.mark.distributed, id="fsdp2"),
    *(pytest.param(f"{stage}_cpu", marks=pytest.mark.deepspeed, id=stage) for stage in ("zero2", "zero3")),
]


@pytest.fixture
def folder(tmp_path):
    """The folder of a run, with the initial policies in it."""
    for name in ("qwen", "llama"):
        tiny.policy(name).save_pretrained(tmp_path / "policies" / name)
    return tmp_path


def launch(repository, backend, scenario, folder, timeout=240):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(repository / "configs" / "accelerate" / f"{backend}.yaml")),
        *("--main_process_port", str(port)),
        *(str(repository / "tests" / "launched.py"), scenario, str(folder)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]


def logs(path):
    return [log for log in json.loads(path.read_text()) if "loss" in log]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_make_the_same_updates_as_one(repository, folder, backend):
    launch(repository, backend, "updates", folder)
    for order in ("mixed", "self_first"):
        one = tiny.trainer(folder / "one", minibatch_order=order, **tiny.PLAIN_SGD)
        start = {name: tiny.parameters(one, name).clone() for name in one.agents}
        one.train()
        expected_logs = [log for log in one.state.log_history if "loss" in log]
        for cut in ("4x1", "2x2"):
            state = torch.load(folder / f"{order}-{cut}.pt", weights_only=True)
            for name in one.agents:
                assert (state[name] - start[name]).abs().max() > 1e-3
                torch.testing.assert_close(state[name], tiny.parameters(one, name), rtol=0, atol=1e-6)
            for log, expected in zip(logs(folder / f"{order}-{cut}.json"), expected_logs, strict=True):
                assert log["loss"] == pytest.approx(expected["loss"], abs=1e-6)
                assert log.keys() == expected.keys()
                for key in expected:
                    if not key.startswith(("time/", "epoch")):
                        assert log[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_without_usable_peer_rollouts_does_not_hang(repository, folder, backend):
    launch(repository, backend, "dropped", folder)
    for order in ("mixed", "self_first"):
        first = logs(folder / f"dropped-{order}.json")[0]
        # Half of the peer's 8 rollouts: those of the second process.
        assert first["qwen/dropped/undecodable"] == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_resume_within_a_step_is_bit_identical(repository, folder, backend):
    """Sampled for real, which under ZeRO-3 gathers the weights; what save_model writes are the trained weights."""
    launch(repository, backend, "resume", folder)
    whole, resumed = (torch.load(folder / f"{run}.pt", weights_only=True) for run in ("whole", "resumed"))
    for name in whole:
        assert torch.equal(whole[name], resumed[name])
    runs = [
        [{k: v for k, v in log.items() if not k.startswith("time/")} for log in logs(folder / f"{run}.json")]
        for run in ("whole", "resumed")
    ]
    assert runs[0] == runs[1]

    for name in whole:
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved" / name)
        assert torch.equal(torch.cat([p.flatten() for p in saved.parameters()]), whole[name])


@pytest.mark.distributed
def test_resume_on_another_number_of_processes(repository, folder):
    """It works from a checkpoint between two steps, and says why it cannot within one."""
    launch(repository, "cpu_2proc", "resume", folder)
    one = tiny.trainer(folder / "one", generation=None, max_steps=7)
    with pytest.raises(ValueError, match=r"1 updates into a step of 2.*over 2 processes; this run has 1"):
        one.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    between_steps = tiny.trainer(folder / "between", generation=None, max_steps=7)
    between_steps.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-6"))
    assert between_steps.state.global_step == 7


@pytest.mark.distributed
def test_evaluation_counts_every_prompt_once(repository, folder):
    launch(repository, "cpu_2proc", "evaluate", folder)
    two = json.loads((folder / "evaluate.json").read_text())
    one = tiny.trainer(folder / "one", eval_dataset=conv_dataset("test", 5)).evaluate()
    for key in one:
        if "reward" in key:
            assert two[key] == pytest.approx(one[key]), key


@pytest.mark.deepspeed
def test_a_reward_model_scores_alike_under_zero3(repository, folder):
    """ZeRO-3 deals out every model that is loaded, reward models too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tiny.tokenizer("qwen")), num_labels=1, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    tiny.tokenizer("qwen").save_pretrained(folder / "judge")
    launch(repository, "zero3_cpu", "reward_model", folder)
    functions = [str(folder / "judge"), tiny.partial_reward]
    one = tiny.trainer(folder / "one", reward_funcs=functions, max_steps=2)
    one.train()
    first, expected = logs(folder / "reward_model.json")[0], one.state.log_history[0]
    for name in one.agents:
        for key in (f"{name}/rewards/judge/mean", f"{name}/rewards/judge/std", f"{name}/reward"):
            assert first[key] == pytest.approx(expected[key], abs=1e-6)
