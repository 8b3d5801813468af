"""Real vLLM servers on this machine's CPU, a core each; run by `make test-vllm`.

The servers run in an environment of their own, whose interpreter is `$HACPO_TRL_VLLM_PYTHON`.
"""

import json
import os
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from launching import free_port, launch, launch_well
from peft import LoraConfig, get_peft_model
from test_distributed import logs
from transformers import AutoConfig, AutoModelForCausalLM

from hacpo_trl import AgentConfig, HACPOConfig
from hacpo_trl.agent import Agent
from hacpo_trl.backends.log_probabilities import prepare_policy, score
from hacpo_trl.embedded.policies import POLICIES, make_policy, make_tokenizer
from hacpo_trl.generation.backend import GenerationRequest
from hacpo_trl.generation.vllm_servers.client import VLLMServerError
from hacpo_trl.generation.vllm_servers.generation import VLLMServerGeneration
from hacpo_trl.generation.vllm_servers.serving import RunningServer, servers_of, stop, wait_until_up


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SPECS = {"tied": "qwen3-vllm", "untied": "llama-vllm", "adapter": "llama-vllm"}
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TEMPERATURE = 0.7
PROMPTS = ["akz=", "bcd=", "ABC=", "xyz="]


def make_model(name: str, folder: Path):
    """A policy with random weights, tied or not, and its tokenizer, on the disk."""
    spec = POLICIES[SPECS[name]]
    config = make_policy(spec, 0).config
    settings = {**config.to_dict(), "tie_word_embeddings": name == "tied"}
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.save_pretrained(folder)
    make_tokenizer(spec).save_pretrained(folder)


class Servers:
    """The servers of some agents, started as `python -m hacpo_trl.serve` starts them."""

    def __init__(self, folder: Path, names):
        self.agents = []
        for core, name in enumerate(names):
            make_model(name, folder / name)
            agent = {
                "name": name,
                "model_name_or_path": str(folder / name),
                "max_model_length": 1024,
                "vllm_server_base_url": f"http://127.0.0.1:{free_port()}",
                "vllm_group_port": free_port(),
                "vllm_server_devices": str(core % os.cpu_count()),
                "vllm_server_args": {"kv_cache_memory_bytes": "256M", "enforce_eager": True},
            }
            if name == "adapter":
                agent["peft_config"] = ADAPTER
            self.agents.append(agent)
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"agents": self.agents}))
        servers = servers_of(folder / "recipe.yaml", python=os.environ["HACPO_TRL_VLLM_PYTHON"], on_cpu=True)
        self.running = {s.agent: RunningServer(s, folder / f"{s.agent}.log") for s in servers}
        try:
            self.ensure_up()
        except BaseException:
            stop(self.running.values())
            raise

    def ensure_up(self):
        """Starts servers that a test has killed."""
        for running in self.running.values():
            if running.ended:
                running.start()
        wait_until_up(self.running.values(), 600)

    def kill(self, name: str):
        self.running[name].signal(signal.SIGKILL)
        self.running[name].process.wait()

    def backend(self, folder: Path, **settings) -> VLLMServerGeneration:
        """The trainer's side, over policies as they were saved."""
        limits = {"vllm_server_timeout": 10, "vllm_sync_timeout": 30}
        args = HACPOConfig(
            str(folder),
            agents=[AgentConfig(**agent) for agent in self.agents],
            use_vllm=True,
            vllm_mode="server",
            temperature=TEMPERATURE,
            report_to=[],
            **({"max_completion_length": 16} | limits | settings),
        )
        # After the arguments, which reset what accelerators share.
        accelerator = Accelerator(cpu=True)
        agents = {}
        for config in args.agents:
            model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32)
            if config.peft_config is not None:
                model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config.peft_config))
            agents[config.name] = Agent(config, args, model, make_tokenizer(POLICIES[SPECS[config.name]]))
            prepare_policy(agents[config.name].policy, TEMPERATURE)
        backend = VLLMServerGeneration(
            agents, lambda name: (accelerator, agents[name].policy), args, lambda: backend.version
        )
        backend.version = 0
        return backend


def prompt_ids(name: str) -> list[list[int]]:
    return make_tokenizer(POLICIES[SPECS[name]])(PROMPTS).input_ids


def requests_of(backend, num_generations: int) -> dict[str, GenerationRequest]:
    return {name: GenerationRequest(prompt_ids(name), num_generations, 0) for name in backend.agents}


def move(backend):
    """Other weights for all agents, by far: of an adapter, for the adapter alone."""
    torch.manual_seed(backend.version)
    with torch.no_grad():
        for agent in backend.agents.values():
            for parameter in agent.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    backend.version += 1


@torch.no_grad()
def greedy(policy, ids: list[int], count: int) -> list[int]:
    """What transformers would answer."""
    prompt, ids = list(ids), []
    for _ in range(count):
        ids.append(int(policy(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
        if ids[-1] == 1:
            break
    return ids


def assert_serves_the_policies(backend):
    backend.sync_weights()
    for name, client in backend.clients.items():
        policy = backend.agents[name].policy.eval()
        answered = client.generate(prompt_ids(name), temperature=0.0, max_tokens=12)["completion_ids"]
        for ids, answer in zip(prompt_ids(name), answered, strict=True):
            assert answer == greedy(policy, ids, len(answer)), name
    answers = backend.generate(requests_of(backend, 4))
    for name, of_agent in answers.items():
        agent, ids = backend.agents[name], [ids for ids in prompt_ids(name) for _ in range(4)]
        scored = score(backend.engines(name)[0], agent.policy, ids, [a.ids for a in of_agent], 0, 16)
        for answer, logps in zip(of_agent, scored, strict=True):
            torch.testing.assert_close(torch.tensor(answer.logps), logps, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def servers(folder):
    servers = Servers(folder, ["tied", "untied", "adapter"])
    yield servers
    stop(servers.running.values())


@pytest.fixture
def up(servers):
    servers.ensure_up()
    return servers


def test_after_each_sync_the_servers_answer_as_the_policies_do(up, tmp_path):
    backend = up.backend(tmp_path)
    assert_serves_the_policies(backend)
    for _ in range(2):
        before = {
            name: client.generate(prompt_ids(name), temperature=0.0, max_tokens=12)["completion_ids"]
            for name, client in backend.clients.items()
        }
        move(backend)
        assert_serves_the_policies(backend)
        for name, client in backend.clients.items():
            after = client.generate(prompt_ids(name), temperature=0.0, max_tokens=12)["completion_ids"]
            assert after != before[name], f"{name}: weights so far apart must answer differently"


def test_a_fresh_run_does_not_sample_from_what_the_server_holds(up, tmp_path):
    first = up.backend(tmp_path / "first")
    move(first)
    first.sync_weights()
    # The second run begins with the weights on the disk, which the servers no longer hold.
    assert_serves_the_policies(up.backend(tmp_path / "second"))


def write_agents(folder: Path, agents: list[dict]):
    """For a launched run: the same servers, and ports that this process has not taken."""
    agents = [{**agent, "vllm_group_port": free_port()} for agent in agents]
    (folder / "agents.json").write_text(json.dumps(agents))


def test_hacpo_under_zero3_on_two_processes(up, repository, tmp_path):
    write_agents(tmp_path, up.agents)
    launch_well(repository, "zero3_cpu", "vllm", tmp_path)
    for mode in ("recompute", "sampler"):
        steps = logs(tmp_path / f"{mode}.json")
        assert len(steps) == 3
        for log in steps:
            for name in SPECS:
                # In every step, so after every sync: a server with weights of the step before would be far off.
                assert log[f"{name}/sampling/logp_difference/max"] < 1e-4
    moved = json.loads((tmp_path / "moved.json").read_text())
    assert all(distance > 1e-2 for distance in moved.values()), moved


def test_a_server_killed_while_it_answers_is_a_clear_error(up, tmp_path):
    backend = up.backend(
        tmp_path, max_completion_length=1000, generation_kwargs={"ignore_eos": True, "min_tokens": 999}
    )
    backend.sync_weights()
    killer = threading.Timer(1.5, lambda: up.kill("untied"))
    killer.start()
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=r"Agent 'untied', vLLM server http\S+: not up after .*10 s"):
        backend.generate(requests_of(backend, 16))
    assert 1.5 < time.monotonic() - start < 120
    killer.join()


def test_a_server_killed_while_weights_travel_is_a_clear_error(up, tmp_path, monkeypatch):
    monkeypatch.setattr("hacpo_trl.generation.vllm_servers.weights.BUCKET_BYTES", 30_000)
    backend = up.backend(tmp_path, vllm_sync_timeout=10)
    client = backend.clients["tied"]
    send, sent = client.send, []

    def send_and_kill(bucket):
        sent.append(bucket)
        if len(sent) == 2:
            up.kill("tied")
        send(bucket)

    client.send = send_and_kill
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=r"Agent 'tied', vLLM server http\S+: not up after .*10 s"):
        backend.sync_weights()
    assert time.monotonic() - start < 60
    assert len(sent) == 2


def test_training_goes_on_from_the_last_checkpoint_with_a_new_server(up, repository, tmp_path):
    write_agents(tmp_path, up.agents[:2])
    (tmp_path / "kill.json").write_text(json.dumps({"process_group": up.running["untied"].process.pid, "after": 3}))
    broken = launch(repository, "cpu_2proc", "vllm_resume", tmp_path)
    assert broken.returncode != 0
    assert "VLLMServerError: Agent 'untied', vLLM server" in broken.stderr
    assert not (tmp_path / "done.json").exists()
    (tmp_path / "kill.json").unlink()
    up.running["untied"].process.wait()
    up.ensure_up()
    launch_well(repository, "cpu_2proc", "vllm_resume", tmp_path)
    steps = logs(tmp_path / "done.json")
    assert [log["step"] for log in steps] == [1, 2, 3, 4]
    assert all(log[f"{name}/sampling/logp_difference/max"] < 1e-4 for log in steps for name in ("tied", "untied"))


def test_two_servers_answer_side_by_side(up, tmp_path):
    """A core each: both agents' answers take hardly longer than the slower one's alone."""
    backend = up.backend(
        tmp_path, max_completion_length=200, generation_kwargs={"ignore_eos": True, "min_tokens": 199}
    )
    backend.sync_weights()
    requests = {name: request for name, request in requests_of(backend, 16).items() if name != "adapter"}

    def seconds(names) -> float:
        start = time.monotonic()
        backend.generate({name: requests[name] for name in names})
        return time.monotonic() - start

    seconds(requests)
    rounds = [(seconds(["tied"]), seconds(["untied"]), seconds(requests)) for _ in range(5)]
    alone = [statistics.median(times) for times in list(zip(*rounds, strict=True))[:2]]
    together = statistics.median(times[2] for times in rounds)
    print(f"alone {alone[0]:.2f} s and {alone[1]:.2f} s, together {together:.2f} s")
    assert together <= 1.25 * max(alone)
