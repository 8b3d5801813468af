"""The trainer's side of vLLM servers, against a server that records what it is asked. `test_vllm.py` has real ones."""

import socket
import sys
import threading
import time
import types

import pytest
import tiny
import torch
from accelerate import Accelerator
from fake_vllm import FakeServer
from launching import free_port
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hacpo_trl import AgentConfig, HACPOConfig
from hacpo_trl.agent import Agent
from hacpo_trl.generation.backend import GenerationRequest
from hacpo_trl.generation.vllm_servers.client import VLLMServerError
from hacpo_trl.generation.vllm_servers.generation import VLLMServerGeneration


@pytest.fixture
def fleet(tmp_path):
    released.clear()
    fleet = Fleet(tmp_path)
    yield fleet
    # No thread may be left that hangs: one that wakes while the interpreter ends would abort it.
    released.set()
    for server in fleet.servers.values():
        server.close()
        server.group = None


class Fleet:
    """Agents and their servers."""

    def __init__(self, folder):
        self.folder = folder
        self.weights = "first"
        self.policies, self.servers = {}, {}
        for name in ("qwen", "llama"):
            self.policies[name] = tiny.policy(name)
            self.policies[name].config._name_or_path = f"models/{name}"
            self.servers[name] = FakeServer(tiny.tokenizer(name), f"models/{name}", self.policies[name].vocab_size)

    def backend(self, names=("qwen", "llama"), agent_settings=None, **settings) -> VLLMServerGeneration:
        limits = {"vllm_server_timeout": 5, "vllm_generation_timeout": 5, "vllm_sync_timeout": 5}
        agents = [
            AgentConfig(
                name,
                max_model_length=32,
                vllm_server_base_url=self.servers[name].url,
                vllm_group_port=free_port(),
                **(agent_settings or {}),
            )
            for name in names
        ]
        args = HACPOConfig(
            str(self.folder),
            agents=agents,
            use_vllm=True,
            vllm_mode="server",
            max_completion_length=8,
            report_to=[],
            **(limits | settings),
        )
        built = {a.name: Agent(a, args, self.policies[a.name], tiny.tokenizer(a.name)) for a in args.agents}
        # After the arguments, which reset what accelerators share.
        accelerator = Accelerator(cpu=True)
        return VLLMServerGeneration(built, lambda name: (accelerator, self.policies[name]), args, lambda: self.weights)

    def ask(self, backend, num_generations=2):
        backend.sync_weights()
        prompts = {name: tiny.tokenizer(name)(["akz=", "bcd="]).input_ids for name in backend.agents}
        return backend.generate({name: GenerationRequest(ids, num_generations, 0) for name, ids in prompts.items()})


def sent(server) -> list[str]:
    return [path for path, _ in server.requests]


released = threading.Event()


def hang(body):
    """Does not answer while a test can wait, and does nothing of what was asked afterwards."""
    released.wait(30)
    raise RuntimeError("too late")


# ---- which servers are refused --------------------------------------------------------------------------------------
def breaks(change, message):
    return pytest.param(change, message, id=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        breaks(lambda s: s.served.update(root="models/other"), "serves the model 'models/other'"),
        breaks(lambda s: s.served.update(max_model_len=31), "--max-model-len is 31"),
        breaks(lambda s: setattr(s, "tokenizer", tiny.tokenizer("llama")), "tokenizer is not the agent's"),
        breaks(lambda s: setattr(s, "vocab_size", s.vocab_size - 1), "vocabulary does not have the size"),
        breaks(lambda s: setattr(s, "vocab_size", s.vocab_size + 1), "vocabulary does not have the size"),
        breaks(lambda s: s.info["model_config"].update(logprobs_mode="raw_logprobs"), "--logprobs-mode is raw"),
        breaks(lambda s: s.info["model_config"].update(generation_config="auto"), "--generation-config is 'auto'"),
        breaks(lambda s: s.info.update(weight_transfer_config=None), "weight-transfer backend is None"),
        breaks(lambda s: s.info["weight_transfer_config"].update(backend="nccl"), "weight-transfer backend is nccl"),
    ],
)
def test_a_server_that_is_not_the_agents_is_refused(fleet, change, message):
    fleet.backend()  # as they are, they will do
    change(fleet.servers["qwen"])
    with pytest.raises(VLLMServerError, match=message) as error:
        fleet.backend()
    assert str(error.value).startswith(f"Agent 'qwen', vLLM server {fleet.servers['qwen'].url}: ")


def test_a_server_that_is_not_up_is_waited_for_and_then_named(fleet):
    fleet.servers["llama"].close()
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=r"Agent 'llama', .* not up after vllm_server_timeout=2 s"):
        fleet.backend(vllm_server_timeout=2)
    assert 1.5 < time.monotonic() - start < 10


def test_a_server_without_the_development_endpoints_is_refused_with_the_remedy(fleet):
    fleet.servers["qwen"].missing.add("/server_info")
    with pytest.raises(VLLMServerError, match=r"/server_info failed with status 404.*hacpo serve --print"):
        fleet.backend()


# ---- answers --------------------------------------------------------------------------------------------------------
def test_what_a_server_is_asked_and_what_becomes_of_its_answers(fleet):
    fleet.servers["qwen"].answers = [([5, 6, 1], [-0.5, -1.0, -1.5]), ([7] * 8, [-2.0] * 8)]
    backend = fleet.backend(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, generation_kwargs={"frequency_penalty": 0.1}
    )
    first, second, *_ = fleet.ask(backend)["qwen"]
    assert (first.ids, first.finish_reason, first.logps) == ((5, 6, 1), "stop", (-0.5, -1.0, -1.5))
    assert (second.ids, second.finish_reason) == ((7,) * 8, "length")
    body = fleet.servers["qwen"].asked("/v1/completions")[-1]
    assert body["prompt"] == tiny.tokenizer("qwen")(["akz=", "bcd="]).input_ids
    expected = {
        "model": "models/qwen",
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": 0,
        "stop_token_ids": [1],
        "frequency_penalty": 0.1,
        "return_token_ids": True,
    }
    assert {key: body[key] for key in expected} == expected


def test_all_servers_are_asked_before_any_has_answered(fleet):
    both_asked = threading.Barrier(2)
    backend = fleet.backend()
    for server in fleet.servers.values():
        # Ends in a BrokenBarrierError, status 500, unless the other server is asked, too, while this one waits.
        server.before["/v1/completions"] = lambda body: both_asked.wait(3)
    assert set(fleet.ask(backend)) == {"qwen", "llama"}


def test_an_answer_that_was_broken_off_is_an_error(fleet):
    fleet.servers["qwen"].answers = [([5, 6], [-1.0, -1.0])]
    with pytest.raises(VLLMServerError, match="broke an answer off after 2 tokens"):
        fleet.ask(fleet.backend())


def test_a_server_that_does_not_answer_ends_in_an_error_within_the_limit(fleet):
    backend = fleet.backend(vllm_generation_timeout=1)
    backend.sync_weights()
    fleet.servers["llama"].before["/v1/completions"] = hang
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=r"Agent 'llama', .* no answer to /v1/completions within 1 s"):
        fleet.ask(backend)
    assert time.monotonic() - start < 10


# ---- weights --------------------------------------------------------------------------------------------------------
def assert_holds_policy(fleet, name, dtype=torch.float32):
    expected = {n: p.detach().to(dtype) for n, p in fleet.policies[name].named_parameters()}
    assert fleet.servers[name].weights.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(fleet.servers[name].weights[key], tensor), key


def test_the_first_answers_come_from_the_agents_weights_and_later_ones_from_the_new(fleet):
    backend = fleet.backend()
    fleet.ask(backend)
    for name in fleet.servers:
        assert_holds_policy(fleet, name)
        paths = sent(fleet.servers[name])
        assert paths.index("/finish_weight_update") < paths.index("/reset_prefix_cache")
    with torch.no_grad():
        for policy in fleet.policies.values():
            for parameter in policy.parameters():
                parameter.add_(1.0)
    fleet.ask(backend)
    assert len(fleet.servers["qwen"].asked("/finish_weight_update")) == 1, "equal weights are sent once"
    fleet.weights = "second"
    fleet.ask(backend)
    for name in fleet.servers:
        assert_holds_policy(fleet, name)
        assert len(fleet.servers[name].asked("/reset_prefix_cache")) == 2
        assert len(fleet.servers[name].asked("/init_weight_transfer_engine")) == 1, "the group stays"


def test_weights_travel_in_the_servers_dtype_and_in_buckets(fleet, monkeypatch):
    monkeypatch.setattr("hacpo_trl.generation.vllm_servers.weights.BUCKET_BYTES", 20_000)
    fleet.servers["qwen"].info["model_config"]["dtype"] = "torch.bfloat16"
    fleet.ask(fleet.backend())
    assert_holds_policy(fleet, "qwen", torch.bfloat16)
    buckets = [body["update_info"] for body in fleet.servers["llama"].asked("/update_weights")]
    assert len(buckets) > 3
    sizes = [sum(4 * torch.Size(shape).numel() for shape in bucket["shapes"][:-1]) for bucket in buckets]
    assert max(sizes) < 20_000, "a bucket ends with the tensor that fills it"


def test_tied_weights_are_sent_once(fleet):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**fleet.policies["qwen"].config.to_dict(), "tie_word_embeddings": True})
    fleet.policies["qwen"] = AutoModelForCausalLM.from_config(config)
    fleet.policies["qwen"].config._name_or_path = "models/qwen"
    fleet.ask(fleet.backend(names=["qwen"]))
    assert "model.embed_tokens.weight" in fleet.servers["qwen"].weights
    assert "lm_head.weight" not in fleet.servers["qwen"].weights


def test_of_an_adapter_only_the_adapter_travels(fleet, tmp_path):
    policy = get_peft_model(fleet.policies["qwen"], LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    fleet.policies["qwen"] = policy
    with pytest.raises(VLLMServerError, match="start the server with --enable-lora"):
        fleet.backend(names=["qwen"])
    lora = fleet.servers["qwen"].info["lora_config"] = {"max_lora_rank": 2, "target_modules": ["q_proj"]}
    with pytest.raises(VLLMServerError, match="--max-lora-rank is 2, but the agent's adapter has rank 4"):
        fleet.backend(names=["qwen"])
    lora["max_lora_rank"] = 16
    with pytest.raises(VLLMServerError, match=r"\['q_proj'\], but the agent's adapter is on \['q_proj', 'v_proj'\]"):
        fleet.backend(names=["qwen"])
    lora["target_modules"] = None
    backend = fleet.backend(names=["qwen"])
    for weights in ("first", "second"):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        fleet.weights = weights
        fleet.ask(backend)
        body = fleet.servers["qwen"].asked("/v1/load_lora_adapter")[-1]
        assert (body["lora_name"], body["load_inplace"]) == ("qwen", True)
        saved = load_file(f"{body['lora_path']}/adapter_model.safetensors")
        trained = {n.replace(".default", ""): p for n, p in policy.named_parameters() if p.requires_grad}
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name], parameter) for name, parameter in trained.items())
        assert fleet.servers["qwen"].asked("/v1/completions")[-1]["model"] == "qwen"
    assert "/update_weights" not in sent(fleet.servers["qwen"])
    assert len(fleet.servers["qwen"].asked("/reset_prefix_cache")) == 2


def test_on_gpus_weights_travel_over_vllms_nccl_group(fleet, monkeypatch):
    """With stand-ins for vLLM's two functions and for the GPU: what they are called with, and in which order."""
    calls, communicator = [], types.SimpleNamespace(group=types.SimpleNamespace(store="store", socket="socket"))

    def trainer_init(info):
        calls.append(("join", info))
        return communicator

    def producer(iterator, group, src, post_iter_func):
        assert (group, src) == (communicator, 0)
        calls.append(("send", {item[0]: post_iter_func(item) for item in iterator}))

    root = "vllm.distributed.weight_transfer"
    for name, function in (("nccl_common", trainer_init), ("packed_tensor", producer)):
        module = types.ModuleType(f"{root}.{name}")
        setattr(module, {"packed_tensor": "packed_nccl_broadcast_producer"}.get(name, "trainer_init"), function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.distributed", root):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("synchronize", None)))

    server = fleet.servers["qwen"]
    server.info["weight_transfer_config"]["backend"] = "nccl"
    server._init_weight_transfer_engine = lambda body: {}
    server._update_weights = lambda body: {}
    backend = fleet.backend(names=["qwen"])
    backend.sync_weights()
    assert [name for name, _ in calls] == ["device", "join", "device", "send", "synchronize"]
    assert calls[0] == ("device", 3)
    info = server.asked("/init_weight_transfer_engine")[0]["init_info"]
    assert calls[1][1].items() <= info.items()
    assert {"rank_offset": 1, "world_size": 2, "packed": True}.items() <= info.items()
    assert calls[3][1].keys() == dict(fleet.policies["qwen"].named_parameters()).keys()
    backend.clients["qwen"].leave()
    assert (communicator.group.store, communicator.group.socket) == (None, None), "the port is free again"


# ---- faults ---------------------------------------------------------------------------------------------------------
def once(failure):
    """Fails the first time only."""
    left = [failure]
    return lambda body: left.pop()(body) if left else None


@pytest.mark.parametrize("weights", ["first", "second"])
def test_a_restarted_server_is_noticed_and_given_the_weights_again(fleet, weights):
    backend = fleet.backend()
    fleet.ask(backend)
    fleet.servers["qwen"].restart()
    fleet.weights = weights
    assert len(fleet.ask(backend)["qwen"]) == 4
    assert_holds_policy(fleet, "qwen")
    assert len(fleet.servers["qwen"].asked("/init_weight_transfer_engine")) == 2
    assert len(fleet.servers["llama"].asked("/init_weight_transfer_engine")) == 1


def test_a_server_that_fails_while_it_answers_is_asked_once_more(fleet):
    backend = fleet.backend()

    def crash(body):
        fleet.servers["qwen"].restart()
        raise RuntimeError("the engine died")

    backend.sync_weights()
    fleet.servers["qwen"].before["/v1/completions"] = once(crash)
    answers = fleet.ask(backend)
    assert len(answers["qwen"]) == len(answers["llama"]) == 4
    asked = [b for b in fleet.servers["llama"].asked("/v1/completions") if "logit_bias" not in b]
    assert len(asked) == 1, "the answers of the other server are kept"


def test_a_second_failure_is_an_error_that_names_both(fleet):
    backend = fleet.backend()
    fleet.servers["qwen"].before["/update_weights"] = lambda body: 1 / 0
    with pytest.raises(VLLMServerError, match=r"Agent 'qwen', .*ZeroDivisionError.* It had failed before: .*Zero"):
        backend.sync_weights()
    assert len(fleet.servers["qwen"].asked("/start_weight_update")) >= 2


def test_a_transfer_that_hangs_ends_within_the_limit(fleet):
    backend = fleet.backend(vllm_sync_timeout=1)
    fleet.servers["qwen"].before["/update_weights"] = hang
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=r"Agent 'qwen', .* sending weights"):
        backend.sync_weights()
    assert time.monotonic() - start < 15


def test_a_port_that_is_taken_is_named(fleet):
    backend = fleet.backend(names=["qwen"], vllm_server_timeout=1)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", backend.clients["qwen"].group_port))
        taken.listen()
        with pytest.raises(VLLMServerError, match=r"'qwen', .* vllm_group_port=\d+ of 127.0.0.1 cannot be listened"):
            backend.sync_weights()


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@pytest.mark.parametrize("group_host", [None, "127.0.0.2"])
def test_weights_are_offered_at_one_address_alone(fleet, group_host):
    backend = fleet.backend(vllm_group_host=group_host)
    backend.sync_weights()
    assert_holds_policy(fleet, "qwen")
    port = backend.clients["qwen"].group_port
    open_at = {host for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3") if listens(host, port)}
    assert open_at == {group_host or "127.0.0.1"}


def test_a_key_is_sent_and_never_shown(fleet, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    backend = fleet.backend(names=["qwen"])
    fleet.ask(backend)
    assert fleet.servers["qwen"].keys == {"Bearer sesame"}
    fleet.servers["qwen"].close()
    with pytest.raises(VLLMServerError) as error:
        fleet.ask(backend)
    shown = [
        str(error.value),
        repr(error.value),
        repr(error.value.__cause__),
        repr(backend.clients["qwen"]),
        caplog.text,
    ]
    assert not any("sesame" in text for text in shown)


def test_without_a_key_none_is_sent(fleet, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    fleet.ask(fleet.backend(names=["qwen"]))
    assert fleet.servers["qwen"].keys == {None}


def test_a_second_run_in_one_process_may_have_the_same_ports(fleet):
    first = fleet.backend()
    fleet.ask(first)
    second = fleet.backend()
    for name in second.clients:
        second.clients[name].group_port = first.clients[name].group_port
    fleet.ask(second)
    assert_holds_policy(fleet, "qwen")


def test_an_update_that_another_run_left_unfinished_is_ended_first(fleet):
    server = fleet.servers["qwen"]
    server.updating, server.version = True, "updating someone/3"
    fleet.ask(fleet.backend())
    assert_holds_policy(fleet, "qwen")
    paths = [path for path in sent(server) if "weight_update" in path]
    assert paths == [
        "/start_weight_update",  # refused: one is active
        "/start_weight_update",
        "/finish_weight_update",
        "/start_weight_update",
        "/finish_weight_update",
    ]


# ---- through the trainer --------------------------------------------------------------------------------------------
def test_the_trainer_samples_from_its_servers_and_sends_every_update(fleet, tmp_path):
    trained = []
    for name, server in fleet.servers.items():
        ids = tiny.tokenizer(name)("3,8,7").input_ids
        server.answers = [([*ids, 1], [-1.0] * (len(ids) + 1)), ([ids[0], 1], [-1.0, -2.0])]
    agents = [
        {"name": n, "vllm_server_base_url": s.url, "vllm_group_port": free_port(), "max_model_length": 32}
        for n, s in fleet.servers.items()
    ]
    trainer = tiny.trainer(
        tmp_path,
        models=fleet.policies,
        generation=None,
        agents=agents,
        use_vllm=True,
        vllm_mode="server",
        max_steps=6,  # two for each step
    )
    for server in fleet.servers.values():
        server.before["/v1/completions"] = lambda body: trained.append(trainer.state.global_step)
    trainer.train()
    assert set(trained) == {0, 2, 4}
    for server in fleet.servers.values():
        assert len(server.asked("/finish_weight_update")) == 3
    log = trainer.state.log_history[0]
    assert log["qwen/sampling/logp_difference/max"] >= log["qwen/sampling/logp_difference/mean"] > 0.1
