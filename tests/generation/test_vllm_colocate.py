"""Colocated engines, with a recorder in the place of TRL's `VLLMGeneration`: the real one needs a GPU."""

import pytest
import tiny

from hacpo_trl.generation import vllm_colocate
from hacpo_trl.generation.backend import GenerationRequest


class Recorder:
    """Answers as scripted and keeps what it was made with and asked."""

    made: list["Recorder"]

    def __init__(self, **kwargs):
        self.kwargs, self.calls = kwargs, []
        Recorder.made.append(self)

    def sync_weights(self):
        self.calls.append("sync")

    def generate(self, prompts, images, num_generations):
        self.calls.append(("generate", prompts, images, num_generations))
        answers = [[5, 6, 1] if i % 2 == 0 else [7] * 8 for i in range(len(prompts))]
        return prompts, answers, [[[-0.5]] * len(answer) for answer in answers], None


@pytest.fixture
def recorder(monkeypatch):
    Recorder.made = []
    monkeypatch.setattr(vllm_colocate, "VLLMGeneration", Recorder)
    monkeypatch.setattr(vllm_colocate, "is_vllm_available", lambda: True)
    return Recorder


def models(folder, names=("qwen", "llama")):
    for name in names:
        tiny.policy(name).save_pretrained(folder / name)
    return {name: str(folder / name) for name in names}


def trainer_of(tmp_path, **settings):
    agents = [{"name": "qwen", "temperature": 0.7}, {"name": "llama", "vllm_gpu_memory_utilization": 0.5}]
    return tiny.trainer(
        tmp_path / "run",
        models=models(tmp_path),
        generation=None,
        agents=agents,
        use_vllm=True,
        **{"max_steps": 4, **settings},
    )


@pytest.mark.parametrize("sleep", [False, True])
def test_engines_get_their_agents_settings_and_every_steps_weights(tmp_path, recorder, sleep):
    trainer = trainer_of(tmp_path, vllm_enable_sleep_mode=sleep, generation_kwargs={"frequency_penalty": 0.1})
    assert recorder.made == [], "made when the first answers are wanted"
    trainer.train()
    qwen, llama = recorder.made
    for name, engine in (("qwen", qwen), ("llama", llama)):
        assert engine.kwargs["model"] is trainer.agents[name].policy
        assert engine.kwargs["accelerator"] is trainer.accelerators[name]
        assert engine.kwargs["mode"] == "colocate"
        assert engine.kwargs["enable_sleep_mode"] is sleep
        assert engine.kwargs["max_completion_length"] == 8
        assert engine.kwargs["generation_kwargs"] == {"stop_token_ids": [1], "frequency_penalty": 0.1}
        # Engines that sleep load their weights when they wake.
        expected = ["generate"] * 2 if sleep else ["sync", "generate"] * 2
        assert [call if call == "sync" else call[0] for call in engine.calls] == expected
    assert (qwen.kwargs["temperature"], llama.kwargs["temperature"]) == (0.7, 1.0)
    assert (qwen.kwargs["gpu_memory_utilization"], llama.kwargs["gpu_memory_utilization"]) == (0.3, 0.5)


def test_each_prompt_is_asked_once_for_each_answer(tmp_path, recorder):
    backend = trainer_of(tmp_path).generation
    backend.sync_weights()
    backend.sync_weights()
    answers = backend.generate({"qwen": GenerationRequest([[8, 9], [10]], 2, 0)})["qwen"]
    assert recorder.made[0].calls == ["sync", ("generate", [[8, 9], [8, 9], [10], [10]], None, 2)]
    assert [(a.ids, a.finish_reason) for a in answers[:2]] == [((5, 6, 1), "stop"), ((7,) * 8, "length")]
    assert answers[0].logps == (-0.5, -0.5, -0.5)


def test_more_memory_than_there_is(tmp_path, recorder):
    with pytest.raises(ValueError, match=r"want 1\.1 of each GPU's memory \(qwen: 0\.6, llama: 0\.5\)"):
        trainer_of(tmp_path, vllm_gpu_memory_utilization=0.6)


def test_a_model_without_a_path_is_named(tmp_path, recorder):
    with pytest.raises(ValueError, match=r"Agent 'qwen': vllm_mode='colocate' loads its model from an id or a path"):
        tiny.trainer(tmp_path, generation=None, use_vllm=True)


def test_without_vllm_nothing_begins(tmp_path):
    with pytest.raises(ImportError, match="vllm_mode='colocate' needs vLLM in this environment"):
        trainer_of(tmp_path)


def test_a_backend_of_ones_own_beside_vllm_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_vllm=True has no effect beside a generation_backend"):
        tiny.trainer(tmp_path, use_vllm=True)
