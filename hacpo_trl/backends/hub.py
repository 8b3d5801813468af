"""The Hub: every agent has a repository of its own, with a model card."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from trl.trainer.utils import generate_model_card, get_config_model_id

from ..agent import Agent
from ..files import RESUME_ONLY


PAPER = {
    "title": "Heterogeneous Agent Collaborative Reinforcement Learning",
    "id": "2603.02604",
    "citation": (
        "@article{hacpo2026,\n"
        "    title        = {{Heterogeneous Agent Collaborative Reinforcement Learning}},\n"
        "    year         = 2026,\n"
        "    eprint       = {arXiv:2603.02604}\n"
        "}"
    ),
}


class HubUploads(Trainer):
    """The part of `MultiPolicyTrainer` that pushes agents to the Hub."""

    agents: dict[str, Agent]

    def repository(self, name: str) -> str:
        """The Hub repository of one agent: its own `hub_model_id`, or the run's with the agent's name behind it."""
        run = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return self.agents[name].config.hub_model_id or f"{run}-{name}"

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ):
        """Writes every agent's model card into its folder in `output_dir`.

        Args:
            model_name: Of the run; each agent's has its own name behind it. Default: of its repository.
            dataset_name: What it was trained on.
            tags: Further tags.
        """
        if self.is_world_process_zero():
            for name, agent in self.agents.items():
                folder = Path(self.args.output_dir) / name
                folder.mkdir(parents=True, exist_ok=True)
                self.save_model_card(agent, folder, model_name and f"{model_name}-{name}", dataset_name, tags)

    def save_model_card(
        self,
        agent: Agent,
        folder: Path,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ):
        """Writes the README.md of one agent's folder; see `create_model_card`."""
        further = [tags] if isinstance(tags, str) else list(tags or ())
        base = get_config_model_id(agent.policy.config)
        generate_model_card(
            base_model=base if base and not os.path.isdir(base) else None,
            model_name=model_name or self.repository(agent.name).split("/")[-1],
            hub_model_id=self.repository(agent.name),
            dataset_name=dataset_name,
            tags=["trl", "hacpo", *(["trackio"] if "trackio" in self.args.report_to else []), *further],
            wandb_url=None,
            trackio_url=None,
            trainer_name="HACPO",
            trainer_citation=PAPER["citation"],
            paper_title=PAPER["title"],
            paper_id=PAPER["id"],
        ).save(folder / "README.md")

    def init_hf_repo(self, token: str | None = None, private: bool | None = None):
        if not self.is_world_process_zero():
            return
        api = HfApi(token=token or self.args.hub_token)
        private = self.args.hub_private_repo if private is None else private
        self.hub_model_ids = {
            name: api.create_repo(self.repository(name), private=private, exist_ok=True).repo_id
            for name in self.agents
        }
        self.hub_model_id = next(iter(self.hub_model_ids.values()))
        self._pushes: list[Any] = []

    def _upload(self, name: str, folder: Path, message: str, **kwargs):
        return HfApi(token=self.args.hub_token).upload_folder(
            repo_id=self.hub_model_ids[name], folder_path=folder, commit_message=message, **kwargs
        )

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token=None, revision=None, **kwargs
    ):
        """Pushes every agent to its own repository.

        Returns:
            The commit (or, with `blocking=False`, its future) of each agent by name; None on processes that do not
            push.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        revision = revision or self.args.hub_revision
        return {
            name: self._upload(
                name,
                Path(self.args.output_dir) / name,
                commit_message,
                run_as_future=not blocking,
                ignore_patterns=RESUME_ONLY,
                revision=revision,
            )
            for name in self.agents
        }

    def _push_from_checkpoint(self, checkpoint_folder: str):
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and any(not push.done() for push in self._pushes):
            return
        message = f"Training in progress, step {self.state.global_step}"
        for name in self.agents:
            folder = Path(checkpoint_folder) / name
            common = {"run_as_future": True, "revision": self.args.hub_revision}
            self._pushes.append(self._upload(name, folder, message, ignore_patterns=RESUME_ONLY, **common))
            if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                last = self.args.hub_strategy == HubStrategy.CHECKPOINT
                path = "last-checkpoint" if last else Path(checkpoint_folder).name
                self._pushes.append(self._upload(name, folder, f"{message}, checkpoint", path_in_repo=path, **common))

    def _finish_current_push(self):
        """Waits for uploads under way; one that failed says so."""
        pushes, self._pushes = getattr(self, "_pushes", []), []
        for push in pushes:
            push.result()
