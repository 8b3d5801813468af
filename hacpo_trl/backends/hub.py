"""The Hub: every agent has a repository of its own, with a model card."""

import os
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import CommitInfo
from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from trl.trainer.utils import generate_model_card, get_config_model_id

from ..agent import Agent
from ..files import RESUME_ONLY, UPLOADS
from .uploads import Upload, Uploads


logger = logging.get_logger(__name__)


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
    hub_model_id: str | None
    uploads: Uploads

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
        if self.is_world_process_zero() and self.hub_model_id is None:
            # Repositories are made with the first upload to each: the Hub may not answer yet.
            self.hub_model_id = self.repository(next(iter(self.agents)))
            self.uploads = Uploads(Path(self.args.output_dir) / UPLOADS)

    def check_repositories(self):
        """Refuses two agents with one repository; the Hub tells no case apart."""
        owners: dict[str, str] = {}
        for name in self.agents:
            repository = self.repository(name)
            other = owners.setdefault(repository.lower(), name)
            if other != name:
                raise ValueError(
                    f"Agents '{other}' and '{name}' would be pushed to the same repository, {repository}. Give one of "
                    "them another hub_model_id."
                )

    def _push(
        self,
        name: str,
        folder: Path,
        message: str,
        path_in_repo: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> Future[CommitInfo | None]:
        """Queues an agent's folder, or, with a place in the repository, what of a checkpoint it is continued with."""
        others = [other for other in self.agents if other != name]
        upload = Upload(
            agent=name,
            repository=self.repository(name),
            source=folder,
            message=message,
            path_in_repo=path_in_repo,
            revision=revision or self.args.hub_revision,
            token=token or self.args.hub_token,
            private=self.args.hub_private_repo if private is None else private,
        )
        return self.uploads.add(upload, ignore=others if path_in_repo else RESUME_ONLY)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> dict[str, CommitInfo | Future[CommitInfo | None] | None] | None:
        """Pushes every agent to its own repository. A failure is warned about, and raises nothing.

        Args:
            commit_message: Of the commits.
            blocking: Whether to wait for them.
            token: In place of `hub_token`.
            revision: The branch, in place of `hub_revision`.
            private: Whether repositories that have to be made are private; in place of `hub_private_repo`.
            model_name: For the model cards; see `create_model_card`.
            dataset_name: The same.
            tags: The same.

        Returns:
            By agent the commit, None where it could not be made, or with `blocking=False` its future; None on
            processes that do not push.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.init_hf_repo()
        self.save_model(_internal_call=True)
        self.create_model_card(model_name, dataset_name, tags)
        if not self.is_world_process_zero():
            return None
        message = commit_message or "End of training"
        folder = Path(self.args.output_dir)
        futures = {
            name: self._push(name, folder / name, message, revision=revision, token=token, private=private)
            for name in self.agents
        }
        if not blocking:
            return dict(futures)
        self._finish_current_push()
        return {name: future.result() for name, future in futures.items()}

    def _push_from_checkpoint(self, checkpoint_folder: str):
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and self.uploads.pending:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message, checkpoint = f"Training in progress, step {self.state.global_step}", Path(checkpoint_folder)
        for name in self.agents:
            self._push(name, checkpoint / name, message)
            if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                last = self.args.hub_strategy == HubStrategy.CHECKPOINT
                path = "last-checkpoint" if last else checkpoint.name
                self._push(name, checkpoint, f"{message}, checkpoint", path_in_repo=path)

    def _finish_current_push(self, seconds: float | None = None):
        """Waits for uploads under way, for so long if it is said, and says what was not uploaded."""
        if not hasattr(self, "uploads"):
            return
        for upload in self.uploads.wait(seconds):
            logger.warning(f"Agent '{upload.agent}': the push to {upload.repository} is not done. By hand: {upload}")
        for upload, reason in self.uploads.failed.values():
            logger.warning(f"Agent '{upload.agent}' was not pushed to {upload.repository}: {reason} By hand: {upload}")
        self.uploads.failed.clear()
