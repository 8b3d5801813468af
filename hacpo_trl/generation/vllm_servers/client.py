"""One agent's vLLM server, as the trainer sees it: TRL's client, with limits on everything that may hang.

TRL's `VLLMClient` generates and speaks the server's protocol. What is ours: every request ends within a limit, errors
name the agent and the server, weights also travel without NCCL, the server knows which weights it holds, and one that
is not the agent's is refused before it has answered anything.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from threading import Thread
from typing import Any
from urllib.parse import urlparse

import requests
import torch
import torch.distributed as dist
from trl.generation.vllm_client import VLLMClient

from ...agent import Agent
from .plugin import GLOO_BACKEND
from .transfer import GlooGroup, NCCLGroup, TransferGroup, own_address


# A server that is up answers these at once.
QUICK = 30.0
# Between start and end of an update the server's weight version begins with this.
UPDATING = "updating "
# Holds digits, words, accents and other scripts: two tokenizers that agree on it are hardly different ones.
TOKENIZER_PROBE = "The answer is \\boxed{12345}, or (x+1)^2 = 3,8;7=. Größe, 数学, 2.50 \n"
# By address. It is listened on once in a process, and stays so for further runs in it.
_STORES: dict[tuple[str, int], dist.TCPStore] = {}


class VLLMServerError(RuntimeError):
    """A server failed, or did not answer in time. The message names agent and server.

    Attributes:
        status: The HTTP status, if there was an answer.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class _LimitedSession(requests.Session):
    """Requests without a limit of their own get this session's."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit

    def request(self, *args, **kwargs):
        kwargs.setdefault("timeout", self.limit)
        return super().request(*args, **kwargs)


def _in_background(work: Callable[[], Any]) -> Future:
    future: Future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class ServerClient(VLLMClient):
    """The client of one agent's server.

    Args:
        agent: The agent.
        run: Name of this run, the same on all its processes; weights of any other are strange.
        base_url: The server's address, `http://host:port`.
        group_port: On the trainer's main process, the port at which the server's workers join to receive weights.
        group_host: This machine's address at which they join; None is the one that the server is reached from.
        server_timeout: Seconds to wait for the server to be up.
        generation_timeout: Seconds that the answers to one request may take.
        sync_timeout: Seconds that each step of a weight transfer may take.

    Nothing is asked of the server before `connect`.
    """

    def __init__(
        self,
        agent: Agent,
        run: str,
        base_url: str,
        group_port: int,
        group_host: str | None,
        server_timeout: float,
        generation_timeout: float,
        sync_timeout: float,
    ):
        # Not the parent's: it wants vLLM in this process even where weights travel by gloo, and sets no limits.
        self.agent = agent
        self.base_url = base_url.rstrip("/")
        self.host = urlparse(self.base_url).hostname
        self.group_port = group_port
        self.group_host = group_host
        self.server_timeout = server_timeout
        self.generation_timeout = generation_timeout
        self.sync_timeout = sync_timeout
        self.session = _LimitedSession(QUICK)
        if key := os.environ.get("VLLM_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {key}"
        self.run = run
        self._group: TransferGroup | None = None
        self._connections = 0

    def __str__(self) -> str:
        return f"Agent '{self.agent.name}', vLLM server {self.base_url}"

    # ---- requests ---------------------------------------------------------------------------------------------------
    def _request(self, method: str, url: str, **kwargs) -> Any:
        path = url.removeprefix(self.base_url)
        try:
            response = self.session.request(method, url, **kwargs)
        except requests.exceptions.Timeout:
            limit = kwargs.get("timeout", self.session.limit)
            raise VLLMServerError(f"{self}: no answer to {path} within {limit:g} s.") from None
        except requests.exceptions.RequestException as error:
            raise VLLMServerError(f"{self}: {path} could not be asked or was not answered ({error}).") from error
        if response.status_code != 200:
            hint = ""
            if response.status_code == 404 and not path.startswith("/v1/"):
                hint = " Start the server as `hacpo serve --print` says."
            raise VLLMServerError(
                f"{self}: {path} failed with status {response.status_code}: {response.text[:1000]}{hint}",
                response.status_code,
            )
        return response.json() if "json" in response.headers.get("content-type", "") else {}

    def _get(self, url: str, **kwargs) -> dict:
        return self._request("GET", url, **kwargs)

    def _post(self, url: str, **kwargs) -> dict:
        return self._request("POST", url, **kwargs)

    def _call(self, path: str, body: dict | None = None, timeout: float | None = None) -> dict:
        return self._post(f"{self.base_url}{path}", json=body or {}, timeout=timeout or self.sync_timeout)

    # ---- start ------------------------------------------------------------------------------------------------------
    def wait_until_up(self):
        """Waits for the server, at most `server_timeout` seconds."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            try:
                self._get(f"{self.base_url}/health", timeout=max(1.0, min(QUICK, deadline - time.monotonic())))
                return
            except VLLMServerError as error:
                if time.monotonic() >= deadline:
                    raise VLLMServerError(
                        f"{self}: not up after vllm_server_timeout={self.server_timeout:g} s. Last: {error}"
                    ) from error
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))

    def connect(self):
        """Waits for the server and refuses one that cannot be this agent's."""
        self.wait_until_up()
        served = self._get(f"{self.base_url}/v1/models")["data"][0]
        self.model = served["id"]
        self._info = self.get_server_info()
        self._check_model(served)
        self._check_settings()

    def get_server_info(self) -> dict:
        """The server's `VllmConfig`, as plain data."""
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _check_model(self, served: dict[str, Any]):
        agent = self.agent
        wanted, root = agent.model_name, served["root"]
        if wanted and root != wanted and os.path.abspath(root) != os.path.abspath(wanted):
            raise VLLMServerError(f"{self}: it serves the model '{root}', but the agent's is '{wanted}'.")
        needed = agent.max_prompt_length + agent.max_completion_length
        if served["max_model_len"] < needed:
            raise VLLMServerError(
                f"{self}: its --max-model-len is {served['max_model_len']}, but the agent's prompts and answers take "
                f"up to {needed} tokens (max_model_length). Raise the one or lower the other."
            )
        theirs = self._call("/tokenize", {"prompt": TOKENIZER_PROBE, "add_special_tokens": False})["tokens"]
        ours = agent.tokenizer(TOKENIZER_PROBE, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise VLLMServerError(f"{self}: its tokenizer is not the agent's ({theirs[:8]}... is not {ours[:8]}...).")
        size = agent.policy.config.get_text_config().vocab_size
        if not self._knows(size - 1) or self._knows(size):
            raise VLLMServerError(f"{self}: its vocabulary does not have the size of the agent's, {size}.")

    def _knows(self, token_id: int) -> bool:
        """Whether a token id lies in the vocabulary of the server's model, whose size no endpoint tells."""
        body = {"model": self.model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(token_id): 0.0}}
        try:
            # The first answer of a server takes long: it may still compile.
            self._call("/v1/completions", body, timeout=self.generation_timeout)
        except VLLMServerError as error:
            if error.status == 400:
                return False
            raise
        return True

    def _check_settings(self):
        model_config = self._info["model_config"]
        if model_config["logprobs_mode"] != "processed_logprobs":
            raise VLLMServerError(
                f"{self}: its --logprobs-mode is {model_config['logprobs_mode']}; it must be processed_logprobs, for "
                "log-probabilities at the sampling temperature."
            )
        if model_config["generation_config"] != "vllm":
            raise VLLMServerError(
                f"{self}: its --generation-config is '{model_config['generation_config']}', which may change how the "
                "agent samples; it must be 'vllm'."
            )
        if self.agent.is_adapter:
            self._check_lora()
            return
        transfer = self._info["weight_transfer_config"]
        wanted = "nccl" if torch.cuda.is_available() else GLOO_BACKEND
        if transfer is None or transfer["backend"] != wanted:
            raise VLLMServerError(
                f"{self}: its weight-transfer backend is {transfer and transfer['backend']}; start it with "
                f"""--weight-transfer-config '{{"backend": "{wanted}"}}'."""
            )

    def _check_lora(self):
        """Refuses servers that would load the agent's adapter, or a part of it, without any effect."""
        lora = self._info["lora_config"]
        if lora is None:
            raise VLLMServerError(f"{self}: the agent trains an adapter; start the server with --enable-lora.")
        adapter = self.agent.policy.peft_config["default"]
        if lora["max_lora_rank"] < adapter.r:
            raise VLLMServerError(
                f"{self}: its --max-lora-rank is {lora['max_lora_rank']}, but the agent's adapter has rank "
                f"{adapter.r}."
            )
        wrapped = lora.get("target_modules")
        if wrapped is not None and not set(adapter.target_modules) <= set(wrapped):
            raise VLLMServerError(
                f"{self}: its --lora-target-modules are {sorted(wrapped)}, but the agent's adapter is on "
                f"{sorted(adapter.target_modules)}."
            )
        if adapter.modules_to_save or adapter.bias != "none":
            raise VLLMServerError(
                f"{self}: vLLM loads the matrices of an adapter alone; modules_to_save={adapter.modules_to_save} and "
                f"bias='{adapter.bias}' of the agent's adapter would be left out."
            )

    @property
    def dtype(self) -> torch.dtype:
        """In which the server keeps its weights."""
        return getattr(torch, self._info["model_config"]["dtype"].removeprefix("torch."))

    # ---- weights ----------------------------------------------------------------------------------------------------
    def weight_version(self) -> str:
        """Which weights the server says it holds; a server that was restarted says "default"."""
        return self._get(f"{self.base_url}/weight_info")["weight_version"]

    def _version_of(self, weights: Hashable) -> str:
        """The name under which this run's weights are known to the server."""
        return f"{self.run}/{weights}"

    def _join(self):
        """Opens the group to the server's workers, once for each connection to it."""
        self._connections += 1
        host, port = self.group_host or own_address(self.host), self.group_port
        world_size = self.get_world_size() + 1
        info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        if self._info["weight_transfer_config"]["backend"] == "nccl":
            info |= {"packed": True}
            device = torch.cuda.current_device()

            def open_group():
                return NCCLGroup(host, port, world_size, device)
        else:
            store = self._store(host)
            info |= {"name": f"{self.run}/{self._connections}", "timeout": self.sync_timeout}

            def open_group():
                return GlooGroup(host, port, info["name"], 0, world_size, self.sync_timeout, store)

        self._group = self._both(
            open_group,
            "/init_weight_transfer_engine",
            {"init_info": info},
            "joining the group that weights travel over",
        )

    def _store(self, host: str) -> dist.TCPStore:
        """The store at this agent's port, in which each gloo group has a name of its own; no other address has it."""
        address = host, self.group_port
        if address not in _STORES:
            try:
                listening = socket.create_server(address)
            except OSError as error:
                raise VLLMServerError(
                    f"{self}: vllm_group_port={self.group_port} of {host} cannot be listened on, at which the server "
                    f"would join to receive weights ({error})."
                ) from error
            _STORES[address] = dist.TCPStore(
                host,
                self.group_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        return _STORES[address]

    def _both(self, work: Callable[[], Any], path: str, body: dict, what: str) -> Any:
        """Does this side's part of a transfer while a request has the server do its own.

        An error of either side ends it, and so does `sync_timeout`. Both parts run in threads of their own: neither
        can be stopped when the other side is gone, and as daemons they do not keep the process from ending.
        """
        ours, theirs = _in_background(work), _in_background(lambda: self._call(path, body))
        wait([ours, theirs], timeout=self.sync_timeout, return_when=FIRST_EXCEPTION)
        for part in (theirs, ours):
            if part.done() and part.exception() is not None:
                raise VLLMServerError(f"{self}: {what} failed: {part.exception()}") from part.exception()
        if not (ours.done() and theirs.done()):
            raise VLLMServerError(f"{self}: {what} did not end within vllm_sync_timeout={self.sync_timeout:g} s.")
        return ours.result()

    def begin_update(self, weights: Hashable):
        """Begins to send weights; the server answers nothing until `finish_update`."""
        # A server that was restarted since has left the group.
        held = self.weight_version()
        if self._group is None or not held.startswith(self.run):
            self.leave()
            if held.startswith(UPDATING):
                self._clean_up()
            self._join()
        self._call("/update_weight_version", {"new_version": f"{UPDATING}{self._version_of(weights)}"})
        self._call("/start_weight_update")

    def _clean_up(self):
        """Ends an update that a trainer began and never finished: layers that were half loaded are taken as loaded."""
        try:
            self._call("/start_weight_update")
        except VLLMServerError:
            # One is still active. The server drops it when it cannot read what it is sent.
            with contextlib.suppress(VLLMServerError):
                self._call("/update_weights", {"update_info": {"nothing": None}})
            self._call("/start_weight_update")
        self._call("/finish_weight_update")

    def send(self, named: Sequence[tuple[str, torch.Tensor]]):
        """Sends some of the weights."""
        names, tensors = zip(*named, strict=True)
        if tensors[0].is_cuda:
            # Gathered on this thread's stream, and sent by another thread.
            torch.cuda.current_stream().synchronize()
        update = {
            "names": names,
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        self._both(lambda: self._group.broadcast(named), "/update_weights", {"update_info": update}, "sending weights")

    def finish_update(self, weights: Hashable):
        """Makes what was sent the weights that the server answers with."""
        self._call("/finish_weight_update", {"weight_version": self._version_of(weights)})
        self._forget_prefixes()

    def load_adapter(self, folder: str, weights: Hashable):
        """Swaps the agent's adapter in place; `folder` must be one that the server can read."""
        body = {"lora_name": self.agent.name, "lora_path": folder, "load_inplace": True}
        self._call("/v1/load_lora_adapter", body)
        self._call("/update_weight_version", {"new_version": self._version_of(weights)})
        self._forget_prefixes()

    def _forget_prefixes(self):
        """Keys and values of the old weights must not serve the new ones."""
        if not self._call("/reset_prefix_cache").get("success", True):
            raise VLLMServerError(f"{self}: its prefix cache could not be reset; is someone else asking it?")

    def leave(self):
        """Leaves the group, as after a failure; the next update joins the server anew."""
        if self._group is not None:
            self._group.close()
        self._group = None

    # ---- answers ----------------------------------------------------------------------------------------------------
    def answer(
        self, prompt_ids: Sequence[Sequence[int]], num_generations: int, weights: Hashable
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Samples answers.

        Args:
            prompt_ids: The prompts.
            num_generations: Answers to each prompt.
            weights: Which weights are to answer.

        Returns:
            The answers' token ids, prompt by prompt, and the log-probability in nats of each token, at the sampling
            temperature.
        """
        agent = self.agent
        if (held := self.weight_version()) != self._version_of(weights):
            raise VLLMServerError(
                f"{self}: it holds the weights '{held}' in place of '{self._version_of(weights)}'; it was "
                "restarted, or another run has sent it weights."
            )
        self.session.limit = self.generation_timeout
        try:
            output = self.generate(
                [list(ids) for ids in prompt_ids],
                n=num_generations,
                max_tokens=agent.max_completion_length,
                **agent.vllm_sampling,
            )
        finally:
            self.session.limit = QUICK
        completions = output["completion_ids"]
        for ids in completions:
            whole = len(ids) == agent.max_completion_length or (ids[-1:] and ids[-1] in agent.stop_token_ids)
            if ids and not whole and agent.end_of_stop_string(ids) is None:
                raise VLLMServerError(
                    f"{self}: it broke an answer off after {len(ids)} tokens, before a stop token and before "
                    f"max_completion_length={agent.max_completion_length}."
                )
        logprobs = [[chosen for (chosen, *_) in of_answer] for of_answer in output["logprobs"]]
        if any(chosen is None for of_answer in logprobs for chosen in of_answer):
            raise VLLMServerError(f"{self}: the log-probability of a sampled token is not a number.")
        return completions, logprobs
