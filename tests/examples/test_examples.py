"""What a newcomer runs first: the demo, by the example script and by `hacpo train`."""

import os
import re
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def policies(policies_folder):
    """The environment of a user who has the embedded policies already."""
    return {**os.environ, "HACPO_TRL_CACHE": str(policies_folder), "COLUMNS": "120"}


def run(command, env, **kwargs):
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, **kwargs)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


def demo(repository, env, output_dir, *options):
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(repository / "configs" / "accelerate" / "cpu.yaml")),
        *("--num_cpu_threads_per_process", "1"),
        str(repository / "examples" / "train_qwen_llama.py"),
        *("--output_dir", str(output_dir), "--test_size", "64", *options),
    ]
    return run(command, env)


def test_the_demo_learns_and_continues(repository, policies, tmp_path):
    """Forty updates of the embedded default, which the script runs without a recipe: both agents are better than
    before, the command line wins, and `hacpo train` continues what the script has begun."""
    printed = demo(repository, policies, tmp_path, "--max_steps", "40", "--save_steps", "20")
    assert "HACPO after 40 updates of each agent" in printed
    for name in ("qwen", "llama"):
        before, after, gain = map(
            float, re.search(rf"│ {name} +│ +([\d.]+) │ +([\d.]+) │ +([+-][\d.]+)", printed).groups()
        )
        assert gain == pytest.approx(after - before, abs=2e-3) and gain > 0.03
        assert str(tmp_path / name) in printed
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (
            AutoTokenizer.from_pretrained(tmp_path / name).decode(
                AutoTokenizer.from_pretrained(tmp_path / name)("3,8").input_ids
            )
            == "3,8"
        )
    header, first, *_ = [line for line in printed.splitlines() if "reward" in line or re.match(r"\s+16 ", line)]
    assert header.split()[:3] == ["update", "qwen", "reward"] and len(first.split()) == 8

    assert "hacpo recipes qwen3-4b+llama3.2-3b > my.yaml" in printed

    recipe = ["--config", str(repository / "configs" / "recipes" / "tiny.yaml"), "--output_dir", str(tmp_path)]
    continuing = ["--test_size", "64", "--max_steps", "48", "--save_steps", "20", "--resume"]
    printed = run([sys.executable, "-m", "hacpo_trl", "train", *recipe, *continuing], policies)
    assert "HACPO after 48 updates of each agent" in printed and "my.yaml" not in printed
