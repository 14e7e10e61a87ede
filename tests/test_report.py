"""Pages of made-up runs, and the table of all runs."""

import json
import sys
from html.parser import HTMLParser

import pytest

import plot
import report
import utils
from runtime import cli, resume, run_directory
from test_plot import write_run

ATTACK = "<script>alert(1)</script><img src=x onerror='a'>&\x1b\ud800"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def with_toml(folder, text):
    """Add settings to the config.toml of write_run, whose only section is [model]."""
    with (folder / "config.toml").open("a", encoding="utf-8") as file:
        file.write(text)
    return folder


def write_goodput(folder):
    """An hour of steps in two starts, half an hour of compilation, and one in which it was down."""
    times = {"begin": 0.0, "end": 2700.0, "step": 3, "repeated_s": 0.0, "ended": False}
    line = times | {"seconds": {"steps": 1800.0, "compile": 900.0}}
    other = line | {"begin": 6300.0, "step": 6, "ended": True}
    lines = "".join(json.dumps(x) + "\n" for x in (line, other))
    (folder / "goodput.jsonl").write_text(lines, encoding="utf-8")


def page_of(folder):
    files = plot.plot_runs([folder])
    return Page(files[-1].read_text(encoding="utf-8"))


def test_a_page_loads_nothing_and_text_of_users_and_models_is_escaped(tmp_path):
    folder = with_toml(
        write_run(tmp_path / "<em>&"), f"[sample]\nprompts = [{json.dumps('<i>')}]\n"
    )
    sample = json.dumps({"step": 6, "prompt": "<u>", "text": ATTACK})
    (folder / "samples.jsonl").write_text(sample + "\n", encoding="utf-8")
    start = {
        "step": 0,
        "command": ["main.py", "<s>"],
        "host": "secret",
        "environment": {"A": "zebra"},
    }
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    page = page_of(folder)
    assert not {"script", "em", "i", "u", "s", "link", "iframe"} & {tag for tag, _ in page.tags}
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 6
    assert all(image["src"].startswith("data:image/png;base64,iVBOR") for image in images)
    for text in ("<script>alert(1)", "<em>&", "('<i>',)", "main.py '<s>'", "\\x1b"):
        assert text in page.text, text
    assert (
        "secret" not in page.text
        and "zebra" not in page.text
        and "url(" not in page.text
        and "@import" not in page.text
    )


def test_a_page_has_what_a_run_is_and_has_reached_and_how_it_continues(tmp_path):
    folder = write_run(tmp_path / "tiny")
    mesh = "[mesh]\nfsdp = 2\npipeline = 2\ntensor = 1\n"
    with_toml(folder, f"[train]\nsteps = 6\n{mesh}[run]\nprice_per_hour = 2.5\n")
    write_goodput(folder)
    assert "generate.py" not in page_of(folder).text, "without a checkpoint"
    (folder / "checkpoints").mkdir()
    found = report.facts(folder, "tiny")
    assert found["state"] == "finished" and found["tokens"] == 768 and found["layers"] == 6
    assert found["loss/val"] == 7.5 / 6 and found["tokens_per_s"] == 350.0
    assert found["wall_s"] == 9000.0 and found["goodput"] == 0.4
    assert found["cost"] == pytest.approx(1.5 * 4 * 2.5), "without the time between starts"
    text = page_of(folder).text
    for part in ("2:30:00", "40.0%", "15.00", "train.steps", "generate.py --run", "1.2500"):
        assert part in text, part
    assert "MFU" not in text, "not known"


def test_more_steps_follow_a_schedule_that_does_not_end_at_0(tmp_path):
    run, config = run_directory.at(tmp_path / "a b"), utils.Config()
    more = f"./run.sh python main.py --config '{tmp_path}/a b/config.toml'"
    assert f"{more} --train.steps 600" in resume.next_commands(run, config)
    assert more in resume.next_commands(run, config, finished=False)
    ended = utils.changed(config, {"optimizer.min_lr_ratio": 0.0})
    commands = resume.next_commands(run, ended)
    assert not [c for c in commands if c.startswith(more)]
    assert f"./run.sh python main.py --run.init_from '{tmp_path}/a b' --run.name more" in commands


def test_runs_are_named_by_the_settings_that_differ(tmp_path):
    def config(**changed):
        return utils.changed(utils.Config(), {n.replace("__", "."): v for n, v in changed.items()})

    one, other = config(mesh__fsdp=4, run__name="b"), config(optimizer__lr=0.5)
    assert report.differing([one, other]) == ["optimizer.lr", "mesh.fsdp"]
    assert report.labels(["a", "b"], [one, other]) == ["lr 0.001, fsdp 4", "lr 0.5, fsdp 2"]
    assert report.labels(["a", "b"], [one, one]) == ["a", "b"]
    both = [config(train__seed=n, data__seed=1 - n) for n in (0, 1)]
    assert report.labels(["a", "b"], both)[1] == "train.seed 1, data.seed 0"
    twice = report.labels(["a", "b", "c"], [one, one, other])
    assert twice == ["a: lr 0.001, fsdp 4", "b: lr 0.001, fsdp 4", "c: lr 0.5, fsdp 2"]


def test_runs_of_the_same_name_have_a_row_each_with_what_differs(tmp_path):
    runs = [write_run(tmp_path / name / "tiny", factor=f) for name, f in (("a", 0.5), ("b", 0.25))]
    text = Page(plot.plot_runs(runs)[-1].read_text(encoding="utf-8")).text
    for run in runs:
        assert str(run) in text
    assert "aux_loss_alpha" in text and "0.25" in text


def test_all_runs_below_a_folder_are_listed_best_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot.py", "--runs", str(tmp_path)])
    with pytest.raises(ValueError, match=r"no runs are below this folder. Use --runs runs"):
        plot.main()
    with_toml(write_run(tmp_path / "late", every=5), "[train]\nsteps = 6\n")
    write_run(tmp_path / "group" / "early", every=3)
    write_run(tmp_path / "group" / "none", every=100)
    (write_run(tmp_path / "old") / "config.toml").write_text("[gone]\nkey = 1\n", encoding="utf-8")
    plot.main()
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["run", "state", "parameters", "tokens"]
    assert [row.split()[0] for row in rows] == ["group/early", "late", "group/none", "old"]
    assert "6 of 300" in rows[0] and "finished" in rows[1] and "of another version" in rows[3]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    plot.main()
    found = json.loads(capsys.readouterr().out)
    assert found[0]["loss/val"] == 1.25 and found[2]["loss/val"] is None
    assert cli.load(tmp_path / "late" / "config.toml").train.steps == 6
