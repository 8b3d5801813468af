"""The exchange: every agent's rollouts to every learner (Algorithm 1 of arXiv 2603.02604).

Each process holds all rollouts of its own prompts, those of every agent, so that a group is complete where it is
needed and nothing but the capabilities has to cross processes. This is the one place where rollouts change hands.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from .rollout import LearnerView, Rollout


class Learner(Protocol):
    """Who gets rollouts; `hacpo_trl.agent.Agent` is one."""

    def view(self, rollouts: Sequence[Rollout], prompt_ids: Sequence[Sequence[int]]) -> list[LearnerView]:
        """Rollouts in the learner's own tokens; `prompt_ids`: the step's prompts in them."""
        ...


def exchange(
    rollouts: Mapping[str, Sequence[Rollout]],
    prompt_ids: Mapping[str, Sequence[Sequence[int]]],
    agents: Mapping[str, Learner],
    share: bool,
) -> dict[str, dict[str, list[LearnerView]]]:
    """Hands rollouts to learners.

    Args:
        rollouts: Each source's rollouts, prompt by prompt.
        prompt_ids: The step's prompts in each agent's tokens.
        agents: The agents, by name.
        share: Whether learners get their peers' rollouts too.

    Returns:
        For each learner, its view of each source's rollouts. The learner's own come first, then the peers' by name: no
        result may depend on the order in which agents were listed.
    """
    views = {}
    for learner, agent in agents.items():
        peers = sorted(set(rollouts) - {learner}) if share else []
        views[learner] = {source: agent.view(rollouts[source], prompt_ids[learner]) for source in [learner, *peers]}
    return views
