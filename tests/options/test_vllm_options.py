"""Options of vLLM: what is refused before anything is started."""

import pytest
from tiny_agents import run_config

from hacpo_trl.options.vllm import FIRST_GROUP_PORT, validate_memory


def agents(**of_second):
    first = {"name": "qwen", "vllm_server_base_url": "http://node1:8000"}
    return [first, {"name": "llama", "vllm_server_base_url": "http://node2:8000", **of_second}]


def server(**settings):
    return run_config(**{"use_vllm": True, "vllm_mode": "server", "agents": agents(), **settings})


def test_ports_are_filled_in_and_own_ones_kept():
    assert [a.vllm_group_port for a in server().agents] == [FIRST_GROUP_PORT, FIRST_GROUP_PORT + 1]
    assert [a.vllm_group_port for a in server(agents=agents(vllm_group_port=6000)).agents] == [FIRST_GROUP_PORT, 6000]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"vllm_server_base_url": None},
            r"Agent 'llama': .*'server' needs its vllm_server_base_url.*not None",
        ),
        ({"vllm_server_base_url": "node2:8000"}, r"Agent 'llama': .*not 'node2:8000'"),
        ({"vllm_server_base_url": "http://node1:8000/"}, "Agents 'qwen' and 'llama' share the vLLM server"),
        ({"vllm_group_port": FIRST_GROUP_PORT}, "Agents 'qwen' and 'llama' share vllm_group_port=51216"),
        ({"vllm_gpu_memory_utilization": 0.5}, "Agent 'llama': .*utilization=0.5 has no effect with .*'server'"),
    ],
)
def test_agents_that_have_no_server_of_their_own(second, message):
    with pytest.raises(ValueError, match=message):
        server(agents=agents(**second))


def test_two_names_of_this_machine_are_one_server():
    both = agents(vllm_server_base_url="http://127.0.0.1:8000")
    both[0]["vllm_server_base_url"] = "http://localhost:8000"
    with pytest.raises(ValueError, match="share the vLLM server"):
        server(agents=both)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_mode": "server"}, "vllm_mode='server' has no effect without use_vllm=True"),
        ({"old_logprobs": "sampler"}, "old_logprobs='sampler' has no effect without use_vllm=True"),
        ({"vllm_sync_timeout": 1.0}, "vllm_sync_timeout=1.0 has no effect without use_vllm=True"),
        (
            {"agents": agents()},
            "Agent 'qwen': .*_base_url='http://node1:8000' has no effect without use_vllm",
        ),
        ({"use_vllm": True, "vllm_server_timeout": 1.0}, "has no effect with vllm_mode='colocate'"),
        ({"use_vllm": True, "agents": agents()}, "Agent 'qwen': .* has no effect with vllm_mode='colocate'"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, "no effect without vllm_importance_sampl"),
    ],
)
def test_options_without_effect(settings, message):
    with pytest.raises(ValueError, match=message):
        run_config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": None}, "needs args.agents"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True has no effect with vllm_mode='server'"),
        ({"vllm_sync_timeout": 0.0}, "vllm_sync_timeout must be above 0 seconds, not 0"),
        ({"old_logprobs": "sampler", "top_p": 0.9}, "top_p=0.9 makes vLLM's log-probabilities those of a cut"),
        ({"old_logprobs": "sampler", "agents": agents(top_k=5)}, "Agent 'llama': top_k=5 makes"),
        ({"old_logprobs": "sampler", "vllm_importance_sampling_correction": True}, "Leave one of them out"),
        (
            {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": None},
            "needs a bound",
        ),
        (
            {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_min": 3.0},
            "clip_min=3.0 must be below vllm_importance_sampling_clip_max=3.0",
        ),
    ],
)
def test_settings_of_servers_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        server(**settings)


def test_settings_that_work():
    server(old_logprobs="sampler", min_p=0.0)
    server(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate", top_p=0.9)
    run_config(use_vllm=True, vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.4)


def test_memory_of_colocated_engines():
    validate_memory({"qwen": 0.5, "llama": 0.4})
    with pytest.raises(ValueError, match=r"want 1 of each GPU's memory \(qwen: 0.5, llama: 0.5\)"):
        validate_memory({"qwen": 0.5, "llama": 0.5})
    with pytest.raises(ValueError, match="Agent 'llama': vllm_gpu_memory_utilization must be a share"):
        validate_memory({"qwen": 0.5, "llama": 0.0})
