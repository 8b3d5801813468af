"""Samples by vLLM servers, one an agent, all at work at the same time."""

import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers.utils import logging

from ...agent import Agent
from ...config import HACPOConfig
from ..backend import Completion, GenerationRequest, completion_of
from .client import ServerClient, VLLMServerError
from .weights import save_adapter, weight_buckets


logger = logging.get_logger(__name__)


class VLLMServerGeneration:
    """A `GenerationBackend`: each process asks every agent's server for the answers to its own prompts.

    Weights travel from the main process whenever the agents' have changed since. A server that fails is given one
    chance: all processes wait until it is up again (at most `vllm_server_timeout` seconds), send it the weights anew,
    whatever it holds, and repeat what has failed. If that fails, too, all processes end in a `VLLMServerError`.

    Args:
        agents: The agents, by name.
        engines: For each agent its accelerator and its wrapped policy.
        args: The run's settings.
        weights: Called to know which weights the agents have now; equal values mean equal weights.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        engines: Callable[[str], tuple[Accelerator, nn.Module]],
        args: HACPOConfig,
        weights: Callable[[], Hashable],
    ):
        self.agents = agents
        self.engines = engines
        self.weights = weights
        self._pushed: Hashable = None
        self._adapters = Path(args.output_dir).absolute() / "vllm_adapters"
        run = broadcast_object_list([uuid.uuid4().hex[:12]])[0]
        self.clients = {
            name: ServerClient(
                agent,
                run,
                agent.config.vllm_server_base_url,
                agent.config.vllm_group_port,
                args.vllm_group_host,
                agent.setting("vllm_server_timeout"),
                args.vllm_generation_timeout,
                args.vllm_sync_timeout,
            )
            for name, agent in agents.items()
        }
        with ThreadPoolExecutor(len(self.clients)) as pool:
            list(pool.map(ServerClient.connect, self.clients.values()))

    # ---- weights ----------------------------------------------------------------------------------------------------
    def sync_weights(self):
        """Sends every server its agent's weights, unless it has them. Collective."""
        weights = self.weights()
        if weights == self._pushed:
            return
        failures = {name: error for name in self.agents if (error := self._push(name, weights)) is not None}
        if failures:
            self._recover(failures, weights)
        self._pushed = weights

    def _push(self, name: str, weights: Hashable) -> str | None:
        """Sends one agent's weights; what went wrong, on all processes."""
        accelerator, _ = self.engines(name)
        policy, client, error = self.agents[name].policy, self.clients[name], None
        if self.agents[name].is_adapter:
            folder = self._adapters / name
            save_adapter(accelerator, policy, folder)
            if accelerator.is_main_process:
                error = self._attempt(lambda: client.load_adapter(str(folder), weights))
            # All processes ask for the adapter.
            client.model = name
        else:
            sending = accelerator.is_main_process
            error = self._attempt(lambda: client.begin_update(weights)) if sending else None
            for bucket in weight_buckets(accelerator, policy, client.dtype):
                # Whether sending fails or not, gathering goes on: other processes take part in it.
                if sending and error is None:
                    error = self._attempt(partial(client.send, bucket))
            if sending and error is None:
                error = self._attempt(lambda: client.finish_update(weights))
            if error is not None:
                client.leave()
        return broadcast_object_list([error])[0]

    @staticmethod
    def _attempt(work: Callable[[], None]) -> str | None:
        try:
            work()
        except VLLMServerError as error:
            return str(error)
        return None

    def _recover(self, failures: Mapping[str, str], weights: Hashable):
        """Waits for servers that have failed and sends them their weights; a second failure is an error."""
        for name, failure in failures.items():
            logger.warning(f"{failure} Waiting for the server, to send the weights anew.")
            client = self.clients[name]
            errors = [e for e in gather_object([self._attempt(client.connect)]) if e is not None]
            error = errors[0] if errors else self._push(name, weights)
            if error is not None:
                raise VLLMServerError(f"{error} It had failed before: {failure}")

    # ---- answers ----------------------------------------------------------------------------------------------------
    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        answers, failures = self._ask(requests, requests)
        if failures:
            self._recover(failures, self._pushed)
            again, failures = self._ask(requests, failures)
            answers |= again
        if failures:
            raise VLLMServerError("; ".join(failures.values()))
        return answers

    def _ask(
        self, requests: Mapping[str, GenerationRequest], names: Iterable[str]
    ) -> tuple[dict[str, list[Completion]], dict[str, str]]:
        """Asks the servers of some agents, all of them before any has answered.

        Returns:
            The answers by agent, and by agent what went wrong on any process.
        """

        def ask(name: str) -> list[Completion]:
            request = requests[name]
            ids, logprobs = self.clients[name].answer(request.prompt_ids, request.num_generations, self._pushed)
            agent = self.agents[name]
            return [completion_of(agent, of_answer, logps) for of_answer, logps in zip(ids, logprobs, strict=True)]

        answers, failures = {}, {}
        with ThreadPoolExecutor(len(self.clients)) as pool:
            pending = {name: pool.submit(ask, name) for name in names}
            for name, future in pending.items():
                try:
                    answers[name] = future.result()
                except VLLMServerError as error:
                    failures[name] = str(error)
        everywhere: dict[str, str] = {}
        for of_process in gather_object([failures]):
            everywhere = of_process | everywhere
        return answers, everywhere
