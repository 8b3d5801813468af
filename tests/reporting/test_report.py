"""The report page: its numbers against the logs, its structure, and how runs are found."""

import html
import html.parser
import io
import itertools
import json
import math
import re

import pytest
import tiny
from rich.console import Console
from transformers.trainer import TRAINER_STATE_NAME

from hacpo_trl.commands.report import main
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.files import SETTINGS
from hacpo_trl.options.secrets import settings_without_secrets
from hacpo_trl.reporting.drawing import LABEL_GAP, _spread_out
from hacpo_trl.reporting.page import table_rows
from hacpo_trl.reporting.panels import panels_of
from hacpo_trl.reporting.runs import read_group, read_run
from hacpo_trl.reporting.tables import Table


STEPS = (2, 4, 6)


def write_settings(args, folder):
    (folder / SETTINGS).write_text(json.dumps(settings_without_secrets(args)))


def write_run(folder, offset=0.0, agents=("qwen", "llama"), drops_at=(4,), **settings):
    """A run that nobody has made: agent number i has reward i + step / 100 + offset."""
    log = [{"step": 0, **{f"eval_{name}/reward": i + offset for i, name in enumerate(agents)}}]
    for step in STEPS:
        entry = {"step": step, "loss": 0.0, "time/update": 1.5, "time/generate": 3.0}
        for i, name in enumerate(agents):
            entry |= {
                f"{name}/reward": i + step / 100 + offset,
                f"{name}/grad_norm": 1.0,
                f"{name}/tokens/generated": 1000.0 * step,
                f"{name}/cross_ratio/mean": 0.7,
                f"{name}/cross_ratio/min": 0.1,
                f"{name}/cross_ratio/max": 2.5,
            }
            if step in drops_at:
                entry[f"{name}/dropped/round_trip"] = 3.0
        log.append(entry)
    log.append({"step": 6, **{f"eval_{name}/reward": i + 0.5 + offset for i, name in enumerate(agents)}})
    checkpoint = folder / "checkpoint-6"
    checkpoint.mkdir(parents=True)
    (checkpoint / TRAINER_STATE_NAME).write_text(json.dumps({"global_step": 6, "log_history": log}))
    (checkpoint / "hacpo_state.json").write_text(json.dumps({"updates_per_step": 4}))
    write_settings(tiny.config(folder, **settings), checkpoint)
    return folder


def panels(*texts):
    return {panel.name: panel for panel in panels_of([read_group(text) for text in texts])}


# ---- numbers --------------------------------------------------------------------------------------------------------
def test_curves_have_the_logs_numbers(tmp_path):
    found = panels(str(write_run(tmp_path / "run")))
    llama, qwen = found["reward"].subplots
    assert (llama.title, qwen.title) == ("llama", "qwen")
    assert (list(llama.curves[0].x), llama.curves[0].y) == ([2, 4, 6], pytest.approx([1.02, 1.04, 1.06]))
    assert llama.curves[0].low is None, "one run says nothing about other seeds"
    # By tokens: 1,000 an update, 0 at the start.
    assert found["accuracy_by_tokens"].subplots[1].curves[0].x == [0.0, 6000.0]
    assert found["accuracy"].subplots[1].curves[0].y == [0.0, 0.5]
    assert [curve.label for curve in found["seconds"].subplots[0].curves] == ["generate", "update"]
    # Nothing was dropped in the logs that do not speak of it.
    assert found["dropped"].subplots[0].curves[0].y == [0.0, 3.0, 0.0]
    assert "alignment" not in found, "a panel without numbers is left out"


def test_seeds_are_a_mean_with_students_interval(tmp_path):
    folders = [write_run(tmp_path / str(i), offset) for i, offset in enumerate((0.0, 0.1, 0.5))]
    curve = panels("HACPO=" + ",".join(map(str, folders)))["reward"].subplots[1].curves[0]
    assert curve.y == pytest.approx([0.22, 0.24, 0.26])
    # The offsets have standard deviation 0.26458; t is 4.30265 for 2 degrees of freedom.
    half = 4.30265 * 0.264575 / math.sqrt(3)
    assert curve.low == pytest.approx([y - half for y in curve.y], abs=1e-4)
    assert curve.high == pytest.approx([y + half for y in curve.y], abs=1e-4)


def test_ratios_of_one_run_have_their_range_and_the_clip_bounds(tmp_path):
    subplot = panels(str(write_run(tmp_path / "run")))["cross_ratio"].subplots[0]
    assert (subplot.curves[0].low, subplot.curves[0].high) == ([0.1] * 3, [2.5] * 3)
    # δ = 0.2, δ_step = 0.025, 4 updates a step.
    assert dict(subplot.lines) == pytest.approx(
        {"upper bound": 1.0, "first lower bound": 0.8, "last lower bound": 0.875}
    )


def test_groups_with_other_clip_bounds_have_none_drawn(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", delta=0.5)
    subplot = panels(str(first), str(second))["cross_ratio"].subplots[0]
    assert [curve.label for curve in subplot.curves] == ["a", "b"]
    assert subplot.lines == []


def test_the_table_says_what_the_curves_say(tmp_path):
    found = panels(str(write_run(tmp_path / "run")))
    assert table_rows(found["reward"])[0] == ["llama", "run", "1.02 at 2", "1.04 at 4", "1.06 at 6", "", ""]
    assert table_rows(found["cross_ratio"])[1][2] == "0.7 [0.1, 2.5] at 2"


# ---- runs -----------------------------------------------------------------------------------------------------------
def test_the_newest_log_counts(tmp_path):
    run = write_run(tmp_path / "run")
    log = json.loads((run / "checkpoint-6" / TRAINER_STATE_NAME).read_text())
    log["log_history"].append({"step": 6, "eval_qwen/reward": 0.9})
    (run / TRAINER_STATE_NAME).write_text(json.dumps(log))
    write_settings(tiny.config(run), run)
    assert read_run(run).series("eval_qwen/reward")[6] == 0.9
    assert read_run(run).updates_per_step == 4


@pytest.mark.parametrize("text", ["nowhere", "A=nowhere,elsewhere"])
def test_what_is_no_run_is_named(tmp_path, monkeypatch, text, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([text])
    assert capsys.readouterr().err.startswith("error: nowhere is no run")


def test_seeds_with_other_agents_are_refused(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", agents=("qwen", "mistral"))
    with pytest.raises(ValueError, match=r"'X' have different agents: .*\['llama', 'qwen'\].*\['mistral', 'qwen'\]"):
        read_group(f"X={first},{second}")


def test_two_groups_of_one_name_are_refused(tmp_path, capsys):
    first, second = write_run(tmp_path / "1" / "run"), write_run(tmp_path / "2" / "run")
    with pytest.raises(SystemExit, match="2"):
        main([str(first), str(second)])
    assert "two groups share a label: run, run" in capsys.readouterr().err


# ---- labels ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heights", [[0.5, 0.5, 0.5], [0.0, 0.01, 1.0], [1.0, 0.99, 0.98, 0.2], [0.3]])
def test_labels_keep_their_order_and_a_distance(heights):
    placed = _spread_out(heights, 0.0, 1.0)
    assert all(-1e-9 <= y <= 1 + 1e-9 for y in placed)
    in_order = [placed[i] for i in sorted(range(len(heights)), key=lambda i: heights[i])]
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in itertools.pairwise(in_order))


# ---- the page -------------------------------------------------------------------------------------------------------
class Page(html.parser.HTMLParser):
    """Collects pictures, table cells and ids, and checks that tags close."""

    def __init__(self, text):
        super().__init__()
        self.images, self.cells, self.ids, self.links, self.open = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        if tag == "img":
            self.images.append(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if "href" in attributes else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] in (["td"], ["th"]):
            self.cells.append(data)


def test_the_page_of_a_real_run_is_whole_and_right(tmp_path):
    trainer = tiny.trainer(
        tmp_path / "run",
        eval_dataset=conv_dataset("test", 4),
        per_device_eval_batch_size=8,
        eval_on_start=True,
        max_steps=4,
        save_strategy="steps",
        save_steps=4,
    )
    trainer.train()
    main([str(tmp_path / "run"), "--output", str(tmp_path / "report")])
    text = (tmp_path / "report" / "index.html").read_text()
    page = Page(text)
    pictures = sorted(path.stem for path in (tmp_path / "report").glob("*.png"))
    assert sorted(page.ids) == pictures
    assert {"accuracy", "capability", "capability_ratio", "cross_ratio", "own_ratio", "alignment"} <= set(pictures)
    assert {link.removeprefix("#") for link in page.links} == set(pictures), "nothing outside of the page"
    assert not re.search(r"https?://", text)
    for image in page.images:
        assert image["alt"] and image["src"].startswith("data:image/png;base64,")
    for key in ("qwen/reward", "llama/capability_ratio/qwen"):
        last = [log for log in trainer.state.log_history if key in log][-1]
        assert f"{last[key]:.4g} at {last['step']}" in page.cells


# ---- names that mean something to who prints them -------------------------------------------------------------------
def test_labels_with_dollars_and_brackets_are_shown_as_they_are(tmp_path, capsys):
    """matplotlib would read formulas between dollars, HTML tags, rich markup."""
    run = write_run(tmp_path / "run")
    label = "$\\frac$ [bold]<b>5$"
    main([f"{label}={run}", "--output", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    assert html.escape(label) in page and label not in page.replace(html.escape(label), "")
    assert list((tmp_path / "page").glob("*.png"))


def test_tables_show_brackets_as_they_are():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Table(["[red]name"], [["org/model[v1]"], ["[/]"]], title="[bold]title").rich())
    text = console.export_text()
    assert all(name in text for name in ("[red]name", "org/model[v1]", "[/]", "[bold]title"))
