"""Reward models: a sequence classifier scores prompt and completion, as in TRL.

`HACPOTrainer` makes a `RewardModel` of every model or model id among its `reward_funcs`.
"""

import contextlib
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.data_utils import apply_chat_template, is_conversational
from trl.trainer.utils import get_config_model_id


class RewardModel:
    """Reward function that takes the first logit of a sequence classification model.

    Conversations go through the reward model's own chat template, prompt and completion together; plain texts are
    joined.

    Args:
        model: The model, its id on the Hub, or its path.
        processing_class: Its tokenizer; loaded from where the model came from if None.
        batch_size: How many completions it scores at once.
        chat_template_kwargs: Keyword arguments of its chat template.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        batch_size: int = 32,
        chat_template_kwargs: dict | None = None,
    ):
        if isinstance(model, str):
            # FSDP can have the first process alone read weights, and deal them out when it wraps a policy; a reward
            # model is whole on every process.
            with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
                model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        path = get_config_model_id(model.config)
        if processing_class is None:
            if not path:
                raise ValueError(
                    "A reward model that was built in memory needs its tokenizer: give it in "
                    "reward_processing_classes."
                )
            processing_class = AutoTokenizer.from_pretrained(path)
        if processing_class.pad_token_id is None:
            processing_class.pad_token = processing_class.eos_token
        # A classifier finds the last token of a padded sequence by its pad token.
        model.config.pad_token_id = processing_class.pad_token_id
        self.__name__ = path.rstrip("/").split("/")[-1] if path else type(model).__name__
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = processing_class
        self.batch_size = batch_size
        self.chat_template_kwargs = chat_template_kwargs or {}

    def _text(self, prompt, completion) -> str:
        if not is_conversational({"prompt": prompt}):
            return prompt + completion
        messages = {"messages": [*prompt, *completion]}
        return apply_chat_template(messages, self.tokenizer, **self.chat_template_kwargs)["text"]

    @torch.inference_mode()
    def __call__(self, prompts: Sequence, completions: Sequence, **kwargs) -> list[float]:
        """Scores of a batch of completions; the scale is the reward model's own."""
        with self._whole_weights():
            return self._scores(prompts, completions)

    def _whole_weights(self):
        """Under ZeRO-3 `from_pretrained` deals the weights out to the processes: gathers them for one call."""
        parameters = list(self.model.parameters())
        if not any(hasattr(parameter, "ds_id") for parameter in parameters):
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters)

    def _scores(self, prompts: Sequence, completions: Sequence) -> list[float]:
        device = PartialState().device
        self.model.to(device)
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                text=texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            )
            # Not every tokenizer's inputs are this model's: a decoder takes no token_type_ids.
            inputs = {key: inputs[key].to(device) for key in ("input_ids", "attention_mask")}
            scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores
