"""The options of `hacpo train`: where they come from, what is refused, and the help."""

import os
from dataclasses import dataclass, fields

import pytest
import transformers
import yaml

from hacpo_trl.commands import early_checks, train_help
from hacpo_trl.commands.launch_options import is_default, split_recipe
from hacpo_trl.commands.recipes import recipe_path
from hacpo_trl.commands.train import main
from hacpo_trl.commands.train_help import HELP, make_help, sections_of
from hacpo_trl.commands.train_options import TrainParser, parse_arguments, prepared_parser


AGENTS = [{"name": "a", "model_name_or_path": "embedded:qwen3"}]


@pytest.fixture
def write(tmp_path):
    """Writes a recipe and returns what names it on the command line."""

    def write(text: str | None = None, **settings) -> list[str]:
        path = tmp_path / "recipe.yaml"
        common = {"agents": AGENTS, "output_dir": str(tmp_path / "run"), "report_to": "none"}
        path.write_text(yaml.safe_dump(common | settings) if text is None else text)
        return ["--config", str(path)]

    return write


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Variables that reading a recipe may set are unset again."""
    for name in ("CUDA_VISIBLE_DEVICES", "OF_A_RECIPE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def error_of(argv, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


# ---- where settings come from ---------------------------------------------------------------------------------------
def test_without_a_recipe_it_is_the_embedded_default():
    script_args, args = parse_arguments(["--delta", "0.4", "--report_to", "none"])
    assert script_args.is_embedded_default and script_args.task == "conv_words"
    assert [agent.model_name_or_path for agent in args.agents] == ["embedded:qwen3-words", "embedded:llama-words"]
    assert (args.delta, args.max_steps, args.output_dir) == (0.4, 160, "outputs/tiny")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "one process on many GPUs takes one"


@pytest.mark.parametrize(("processes", "batch"), [(2, 32), (8, 8), (3, 64)])
def test_the_embedded_default_makes_the_same_updates_on_many_processes(monkeypatch, processes, batch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    parser, _, _ = prepared_parser([])
    assert parser.get_default("per_device_train_batch_size") == batch
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_recipe_by_name_and_one_of_ones_own(write):
    script_args, args = parse_arguments(["--config=tiny", "--report_to", "none"])
    assert script_args.is_embedded_default and args.max_steps == 160
    script_args, args = parse_arguments([*write(task="conv", delta=0.3), "--delta", "0.4"])
    assert not script_args.is_embedded_default and (args.delta, args.max_steps) == (0.4, -1)


def test_agents_on_the_command_line_need_no_recipe(tmp_path):
    agents = '[{"name": "a", "model_name_or_path": "embedded:qwen3"}]'
    script_args, args = parse_arguments(["--agents", agents, "--output_dir", str(tmp_path), "--report_to", "none"])
    assert script_args.task is None and args.max_completion_length == 512
    assert split_recipe([f"--agents={agents}"])[0] is None


def test_the_embedded_default_by_its_path_is_a_recipe(repository):
    assert is_default(recipe_path("tiny"))
    assert not is_default(repository / "configs" / "recipes" / "tiny.yaml")


def test_values_of_a_recipe_become_what_the_options_are(write):
    argv = write(test_dataset_name="math500", reward_weights=2, learning_rate="1e-5", env={"OF_A_RECIPE": 3})
    script_args, args = parse_arguments(argv)
    assert script_args.test_dataset_name == ["math500"] and args.reward_weights == [2]
    assert args.learning_rate == 1e-5 and os.environ["OF_A_RECIPE"] == "3"


def test_numbers_are_numbers_wherever_a_recipe_has_them(write):
    recipe = """
max_steps: 1e2
delta: "0.4"
weight_decay: 1e-2
shuffle_dataset: "no"
run_name: 7
reward_weights: [1e0, 1E-1, "5e-1"]
generation_kwargs: {typical_p: 9e-1}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 1e-7}
agents:
  - {name: a, model_name_or_path: "embedded:qwen3", learning_rate: 1e-3, top_k: 2e1, peft_config: {lora_dropout: 5e-2}}
"""
    _, args = parse_arguments(write(recipe))
    assert (args.max_steps, args.delta, args.weight_decay, args.shuffle_dataset) == (100, 0.4, 0.01, False)
    assert args.run_name == "7" and args.reward_weights == [1.0, 0.1, 0.5]
    assert (args.generation_kwargs, args.lr_scheduler_kwargs) == ({"typical_p": 0.9}, {"min_lr": 1e-7})
    (agent,) = args.agents
    assert (agent.learning_rate, agent.top_k, agent.peft_config) == (1e-3, 20, {"lora_dropout": 0.05})
    assert isinstance(agent.top_k, int) and isinstance(args.max_steps, int)


# ---- what is wrong --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("early", [True, False], ids=["from the help text", "by the parser"])
@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"detla": 0.2}, [], r"recipe.yaml: unknown setting 'detla'. Did you mean 'delta'?"),
        ({"loss_type": "grpo"}, [], "recipe.yaml: unknown setting 'loss_type'. Leave it out: losses are means over"),
        ({"model_name_or_path": "x"}, [], "It is an agent's own: write `model_name_or_path` under an agent"),
        ({"num_processes": 2}, [], "num_processes is about launching. Give it on the command line: --num_processes."),
        ({}, ["--detla", "0.2"], "unknown option 'detla'. Did you mean 'delta'?"),
        ({}, ["--steps-per-generation=4"], "unknown option 'steps_per_generation'. Write `prompts_per_step: 128`"),
    ],
)
def test_unknown_names(write, monkeypatch, capsys, early, settings, arguments, message):
    if not early:
        monkeypatch.setattr(early_checks.importlib.metadata, "version", lambda package: "0.0")
    assert message in error_of([*write(**settings), *arguments], capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delta: [", "recipe.yaml is no YAML: while parsing a flow node"),
        ("- delta", "recipe.yaml must hold settings, `name: value` each, not ['delta']."),
        ("", "recipe.yaml must hold settings"),
        ("env: [A]", "env must map environment variables to values, not ['A']."),
        ("delta: [0.2]", "recipe.yaml: delta must be a number, not [0.2]."),
        ("delta: much", "recipe.yaml: delta must be a number, not 'much'."),
        ("reward_weights: [1, much]", "recipe.yaml: reward_weights[1] must be a number, not 'much'."),
        ("num_generations: 8.5", "recipe.yaml: num_generations must be a whole number, not 8.5."),
        ("train_size: yes", "recipe.yaml: train_size must be a whole number, not True."),
        ("clip_cross: maybe", "recipe.yaml: clip_cross must be true or false, not 'maybe'."),
        ("dataset_name: 1.0", "recipe.yaml: dataset_name must be a text, not 1.0. In YAML, put it in quotes."),
        ("reward_funcs: [{math: 1}]", "recipe.yaml: reward_funcs[0] must be a text, not {'math': 1}."),
        ("agents: [{name: a, top_k: few}]", "Agent 'a': top_k must be a whole number, not 'few'."),
        ("agents: [{name: a, peft_config: 8}]", "Agent 'a': peft_config must be a mapping of names to values, not 8."),
        ("task: conv", "there are no agents. A recipe lists them: agents: [{name: qwen, "),
        (
            "agents: [{name: a, learning_rat: 1}]",
            "Agent 'a': unknown key 'learning_rat'. Did you mean 'learning_rate'?",
        ),
        ("agents: [{name: a}]\ndelta: 3.0\n", "delta must be at most 1, not 3.0"),
    ],
)
def test_recipes_that_cannot_be_read(write, capsys, text, message):
    assert message in error_of(write(text), capsys)


def test_what_the_command_line_alone_can_say_wrong(capsys):
    assert error_of(["conv"], capsys) == "unexpected argument 'conv'. `hacpo train --help` says what there is."
    assert "invalid int value: 'x'" in error_of(["--num_processes", "x"], capsys)
    assert "expected one argument" in error_of(["--config"], capsys)


def test_a_launched_process_starts_no_others(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "a launcher has started this one" in error_of(["--num_processes", "2"], capsys)
    parser = TrainParser()
    with pytest.raises(SystemExit):
        parser.parse_args(["--serve"])
    assert "--serve is for `hacpo train`, which starts processes" in capsys.readouterr().err


# ---- help -----------------------------------------------------------------------------------------------------------
made_with_this_version = pytest.mark.skipif(
    train_help.MADE_WITH.format(transformers.__version__) not in HELP.read_text(encoding="utf-8"),
    reason="the help was made with another version of transformers",
)


def test_the_help_was_made_with_a_version_that_ci_installs(repository):
    pinned = [line for line in (repository / "constraints.txt").read_text().splitlines() if "transformers==" in line]
    version = pinned[0].partition("==")[2]
    assert train_help.MADE_WITH.format(version) in HELP.read_text(encoding="utf-8")


@made_with_this_version
def test_the_help_is_of_the_options_there_are():
    assert HELP.read_text(encoding="utf-8") == make_help(), "the help is old: run `make options`"


@made_with_this_version
def test_every_option_is_in_the_help_once_and_hacpos_come_first():
    text = HELP.read_text(encoding="utf-8")
    shown = early_checks.OPTION.findall(text)
    assert len(set(shown)) == len(shown)
    assert set(TrainParser().settings) <= set(shown)
    titles = ["\nAgents:", "\nTask:", "\nHACPO:", "\nThe step:", "\nLaunching", "\nTrainingArguments of transformers"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places) and text.index("--delta") < text.index("--output_dir")
    assert max(map(len, text.splitlines())) <= train_help.WIDTH + 5


@dataclass
class Settings:
    # --- First -----------------
    a: int = 1
    # --- Second part -----------
    b: int = 2
    c: int = 3


def test_sections_are_the_sources():
    import inspect

    found = sections_of(inspect.getsource(Settings))
    assert found == {"First": ["a"], "Second part": ["b", "c"]}
    assert [name for names in found.values() for name in names] == [f.name for f in fields(Settings)]
