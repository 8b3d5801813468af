"""Generation with vLLM's offline engine, for evaluation: `vllm.LLM` in this process, token ids in and out."""

from collections.abc import Mapping

from ..agent import Agent
from ..generation.backend import Completion, GenerationRequest, completion_of


def import_vllm():
    """vLLM's module; an error says what to install."""
    try:
        import vllm
    except ImportError as error:
        raise ImportError("The backend 'vllm' needs vLLM: pip install 'hacpo_trl[vllm]'.") from error
    return vllm


class VLLMEngine:
    """A model in vLLM.

    Prompts go in as token ids, so that chat template and BOS are the agent's; and every sampling parameter is given,
    because vLLM, too, would fill in the model's own generation_config.

    Args:
        model: Id or path of the model; of the base model for an adapter.
        tokenizer: Id or path of the tokenizer.
        dtype: Name of the weights' dtype.
        max_model_length: Longest prompt and answer together, in tokens; it sizes the cache.
        adapter: Folder of a LoRA adapter, or None.
        adapter_rank: Its rank.
        seed: Seed of the engine. Samples do not depend on it: each request has a seed of its own.
        tensor_parallel_size: GPUs that share the model.
        trust_remote_code: See `HACPOConfig`.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str,
        dtype: str,
        max_model_length: int,
        adapter: str | None = None,
        adapter_rank: int | None = None,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
    ):
        self.vllm = import_vllm()
        lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": adapter_rank}
        self.llm = self.vllm.LLM(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            max_model_len=max_model_length,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            trust_remote_code=trust_remote_code,
            generation_config="vllm",
            **lora,
        )
        self.lora_request = None
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self.lora_request = LoRARequest("adapter", 1, adapter)


class VLLMGeneration:
    """One agent's answers from a `VLLMEngine`; a `GenerationBackend`."""

    def __init__(self, agent: Agent, engine: VLLMEngine):
        self.agent, self.engine = agent, engine

    def sync_weights(self):
        """Nothing: the engine's weights are those that are evaluated."""

    def generate(self, requests: Mapping[str, GenerationRequest]) -> dict[str, list[Completion]]:
        return {name: self._generate(request) for name, request in requests.items()}

    def _generate(self, request: GenerationRequest) -> list[Completion]:
        prompts = [list(ids) for ids in request.prompt_ids for _ in range(request.num_generations)]
        settings = self.agent.generation_config
        parameters = [
            self.engine.vllm.SamplingParams(
                n=1,
                # A seed for each request: with a common one, all samples of a prompt would be the same.
                seed=request.seed + number,
                temperature=settings.temperature if settings.do_sample else 0.0,
                top_p=settings.top_p,
                top_k=settings.top_k or 0,
                min_p=settings.min_p or 0.0,
                repetition_penalty=settings.repetition_penalty,
                max_tokens=settings.max_new_tokens,
                stop_token_ids=self.agent.stop_token_ids,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        outputs = self.engine.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            sampling_params=parameters,
            use_tqdm=False,
            lora_request=self.engine.lora_request,
        )
        return [completion_of(self.agent, output.outputs[0].token_ids) for output in outputs]
