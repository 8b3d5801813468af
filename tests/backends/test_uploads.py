"""Pushes to the Hub: what fails, what is tried again, what is said; and runs that push, against a local Hub."""

import logging
import os
import shutil
import signal
import time
import types
from pathlib import Path

import huggingface_hub.constants
import pytest
import tiny
import torch
from fake_hub import FakeHub
from huggingface_hub.utils import _http
from transformers import TrainerCallback

from hacpo_trl.backends import multi_policy, uploads
from hacpo_trl.backends.manifest import faults, newest_complete
from hacpo_trl.backends.uploads import Upload, Uploads, copy_of, may_help, pause_before
from hacpo_trl.commands import training as command
from hacpo_trl.files import UPLOADS


@pytest.fixture
def hub(monkeypatch):
    hub = FakeHub()
    for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    # The library's own pauses, and ours.
    monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    monkeypatch.setattr(uploads, "PAUSES", (0.01, 0.01, 0.01))
    _http.close_session()
    yield hub
    hub.server.shutdown()
    _http.close_session()


def folder_of(tmp_path, name, text="weights") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "model.safetensors").write_text(text + name)
    (folder / "config.json").write_text("{}" + name)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def push(queue, agent, folder, **kwargs):
    return queue.add(Upload(agent, f"duo-{agent}", folder, f"of {agent}", token="sesame", **kwargs))


# ---- one upload -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
@pytest.mark.parametrize("how", [500, 429, 403, "cut"])
@pytest.mark.parametrize("stage", ["create", "preupload", "lfs", "commit"])
def test_a_fault_of_the_hub_is_said_and_all_else_is_pushed_once(hub, tmp_path, caplog, stage, how, times):
    folders = {name: folder_of(tmp_path, name) for name in ("qwen", "llama")}
    hub.fail(stage, "duo-qwen", how, times)
    queue = Uploads(tmp_path / UPLOADS)
    with caplog.at_level(logging.WARNING):
        futures = {name: push(queue, name, folder) for name, folder in folders.items()}
        assert not queue.wait(60)
    assert hub.content("duo-llama") == content(folders["llama"]) and hub.commits["me/duo-llama"] == ["of llama"]
    # A refusal is one, however often one asks. A connection that was cut behind the commit has brought it.
    arrives = (how != 403 and times == 1) or (stage, how) == ("commit", "cut")
    assert (hub.content("duo-qwen") == content(folders["qwen"])) is arrives
    assert hub.commits.get("me/duo-qwen", []) == (["of qwen"] if arrives else [])
    assert (futures["qwen"].result() is None) == (how == 403 or (times > 1 and (stage, how) != ("commit", "cut")))
    said = "Agent 'qwen': " in caplog.text
    # The library tries some stages again by itself, which is nothing to say.
    assert said or arrives
    assert "llama" not in caplog.text and "sesame" not in caplog.text
    assert not (tmp_path / UPLOADS).exists() and hub.tokens == {"sesame"}


def test_what_is_tried_again_and_after_how_long():
    def error(status, **headers):
        return type("E", (Exception,), {"response": types.SimpleNamespace(status_code=status, headers=headers)})()

    assert [may_help(error(status)) for status in (400, 401, 403, 404, 408, 429, 500, 503)] == [False] * 4 + [True] * 4
    assert may_help(ConnectionResetError()) and not may_help(ValueError("no such file"))
    assert pause_before(error(500), 10.0) == 10.0 and pause_before(ConnectionResetError(), 2.0) == 2.0
    asked = {"Retry-After": "45"}
    assert pause_before(error(429, **asked), 10.0) == 45.0 and pause_before(error(429, **asked), 60.0) == 60.0
    assert pause_before(error(429, **{"Retry-After": "86400"}), 2.0) == uploads.LONGEST_PAUSE
    assert pause_before(error(429, **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), 2.0) == 2.0


def test_uploads_to_one_repository_keep_their_order_and_outlive_their_folder(hub, tmp_path):
    queue = Uploads(tmp_path / UPLOADS)
    for number in range(3):
        folder = folder_of(tmp_path, f"checkpoint-{number}")
        queue.add(Upload("qwen", "duo-qwen", folder, f"step {number}", token="sesame"))
        (folder / "config.json").unlink()
        shutil.rmtree(folder)
    assert not queue.wait(60)
    assert hub.commits["me/duo-qwen"] == ["step 0", "step 1", "step 2"] and hub.most_at_once == 1
    assert hub.content("duo-qwen")["config.json"] == b"{}checkpoint-2"


def test_a_copy_is_of_links_where_it_can_be(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "qwen")
    (folder / "global_step3").mkdir()
    (folder / "global_step3" / "shard.pt").write_text("x")
    linked = copy_of(folder, tmp_path / "linked", ["global_step*"])
    assert sorted(content(linked)) == ["config.json", "model.safetensors"]
    assert (linked / "config.json").samefile(folder / "config.json")
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    copied = copy_of(folder, tmp_path / "copied")
    assert content(copied) == content(folder) and not (copied / "config.json").samefile(folder / "config.json")


def test_what_was_not_pushed_is_a_command(tmp_path):
    upload = Upload("qwen", "me/a duo", tmp_path, "m", "last-checkpoint", "dev")
    assert str(upload) == f"hf upload 'me/a duo' {tmp_path} last-checkpoint --revision dev"
    assert str(Upload("qwen", "me/duo", tmp_path, "m")) == f"hf upload me/duo {tmp_path}"


# ---- runs -----------------------------------------------------------------------------------------------------------
SETTINGS = {"push_to_hub": True, "hub_model_id": "duo", "hub_token": "sesame", "save_strategy": "steps"}
SETTINGS |= {"save_steps": 2, "max_steps": 5, "hub_always_push": True, "generation": None}


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_run_is_continued_from_what_its_repositories_hold(hub, tmp_path, strategy):
    whole = tiny.trainer(tmp_path / "whole", **SETTINGS, hub_strategy=strategy)
    whole.train()
    # As it was after the fourth update: the fifth one is in the folder of the run that was pushed last.
    place = "last-checkpoint" if strategy == "checkpoint" else "checkpoint-4"
    expected = newest_complete(tmp_path / "whole")[0].name if strategy == "checkpoint" else "checkpoint-4"
    downloaded = tmp_path / "downloaded" / expected
    for name in ("qwen", "llama"):
        for path, data in hub.content(f"duo-{name}").items():
            if path.startswith(f"{place}/"):
                target = downloaded / path.removeprefix(f"{place}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    assert not faults(downloaded)
    own = {path.split("/")[1] for path in hub.content("duo-qwen") if path.startswith(f"{place}/")}
    assert "qwen" in own and "llama" not in own
    resumed = tiny.trainer(tmp_path / "resumed", **{**SETTINGS, "push_to_hub": False, "hub_model_id": None})
    resumed.train(resume_from_checkpoint=str(downloaded))
    for name in ("qwen", "llama"):
        assert torch.equal(tiny.parameters(whole, name), tiny.parameters(resumed, name))
    root = {path for path in hub.content("duo-llama") if "/" not in path}
    assert {"config.json", "model.safetensors", "README.md"} <= root and not any("optimizer" in path for path in root)
    assert hub.most_at_once == 1


def test_a_hub_that_fails_ends_no_run(hub, tmp_path, caplog):
    hub.fail("create", "duo-llama", 503, 1000)
    trainer = tiny.trainer(tmp_path, **SETTINGS, hub_strategy="every_save")
    with caplog.at_level(logging.WARNING):
        trainer.train()
        pushed = trainer.push_to_hub()
    assert pushed["llama"] is None and pushed["qwen"].commit_url.startswith(hub.url)
    assert hub.content("duo-qwen")["model.safetensors"] == (tmp_path / "qwen" / "model.safetensors").read_bytes()
    assert "Agent 'llama' was not pushed to duo-llama: " in caplog.text
    assert f"By hand: hf upload duo-llama {tmp_path}/llama" in caplog.text
    assert caplog.text.count("It is tried again in") >= 3


def test_the_command_makes_one_final_commit_an_agent(hub, tmp_path):
    command.train(tiny.trainer(tmp_path, **{**SETTINGS, "save_strategy": "no"}, hub_strategy="end"))
    assert hub.commits == {"me/duo-qwen": ["End of training"], "me/duo-llama": ["End of training"]}
    assert hub.content("duo-qwen")["model.safetensors"] == (tmp_path / "qwen" / "model.safetensors").read_bytes()


def test_push_to_hub_honours_its_arguments(hub, tmp_path):
    settings = {**SETTINGS, "push_to_hub": False, "hub_token": None, "save_strategy": "no", "max_steps": 1}
    trainer = tiny.trainer(tmp_path, **settings)
    arguments = {"token": "of my own", "private": True, "revision": "dev"}
    futures = trainer.push_to_hub(
        "first", blocking=False, model_name="Duo", dataset_name="me/prompts", tags=["toy"], **arguments
    )
    assert {name: future.result().commit_message for name, future in futures.items()} == dict.fromkeys(
        futures, "first"
    )
    card = hub.content("duo-qwen", "dev")["README.md"].decode()
    assert "Duo-qwen" in card and "me/prompts" in card and "- toy" in card and "- hacpo" in card
    assert hub.tokens == {"of my own"} and hub.private["me/duo-qwen"] is True
    assert hub.commits["me/duo-qwen"] == ["first"]
    with pytest.raises(TypeError, match="licence"):
        trainer.push_to_hub(licence="mit")


def test_two_agents_with_one_repository_are_refused(tmp_path):
    agents = [{"name": "qwen", "hub_model_id": "me/Duo-Llama"}, {"name": "llama"}]
    with pytest.raises(
        ValueError, match="Agents 'qwen' and 'llama' would be pushed to the same repository, me/duo-llama"
    ):
        tiny.trainer(tmp_path, hub_model_id="me/duo", agents=agents)


def test_a_run_that_is_told_to_stop_does_not_wait_for_ever(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(multi_policy, "SECONDS_TO_PUSH", 0.2)
    monkeypatch.setattr(uploads, "PAUSES", (600.0,))
    hub.fail("create", "duo-llama", 503, 1000)
    trainer = tiny.trainer(tmp_path, **SETTINGS, hub_strategy="every_save")

    class Tell(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(Tell())
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        trainer.train()
    assert "Agent 'llama': the push to duo-llama is not done. By hand: hf upload duo-llama" in caplog.text
