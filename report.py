"""Describe runs by their records: a row in a table of runs, and a page of HTML.

The page is one file that loads nothing. Text of users and models is escaped.
"""

import base64
import datetime
import math
import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import model
import utils
import weights
from inference.sampling import as_log
from runtime import cli, jsonl, phases, resume, run_directory
from utils import Config, ConfigError

DECISIVE = "model", "optimizer", "train", "data"  # sections that decide what a run learns
MOST_NAMES, MOST_SAMPLES = 3, 30  # settings in a legend; samples of a page
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {  # heading and format of each fact
    "run": ("run", str),
    "state": ("state", str),
    "parameters": ("parameters", "{:,}".format),
    "active": ("active", "{:,}".format),
    "layers": ("layers", str),
    "tokens": ("tokens", "{:,}".format),
    "loss/val": ("validation loss", "{:.4f}".format),
    "bits_per_byte": ("bits per byte", "{:.3f}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "wall_s": ("wall time", lambda seconds: str(datetime.timedelta(seconds=round(seconds)))),
    "goodput": ("goodput", "{:.1%}".format),
    "cost": ("cost", "{:,.2f}".format),
}
OF_SEVERAL = [n for n in COLUMNS if n not in ("active", "layers", "mfu", "goodput", "cost")]


def records_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of steps, and those of evaluations."""
    records = jsonl.read(folder / "metrics.jsonl")
    return [r for r in records if "loss/train" in r], [r for r in records if "loss/val" in r]


def facts(folder: Path, name: str) -> dict[str, Any]:
    """Return what a run is and has reached, by the names of COLUMNS; None for what is not recorded.

    Speed and MFU are medians of steps. Wall time includes that between starts, which has no cost.
    """
    found = dict.fromkeys(COLUMNS) | {"run": name, "state": "of another version"}
    try:
        config = cli.load(folder / "config.toml")
        one_device = {"mesh": utils.Mesh(fsdp=1, pipeline=1, tensor=1)}
        total, active = weights.count(model.declare(utils.changed(config, one_device)))
    except ConfigError:
        return found
    train, evaluations = records_of(folder)
    last, evaluation = (records[-1] if records else {} for records in (train, evaluations))
    spent = phases.total_seconds(lines) if (lines := phases.read(folder)) else {"steps": 0.0}
    done, steps, wall_s = last.get("step", 0), config.train.steps, sum(spent.values())
    paid_s = (wall_s - spent.get("down", 0.0)) * math.prod(config.mesh.shape)
    found["state"] = "finished" if done >= steps else f"{done} of {steps}"
    found |= {"parameters": total, "active": active, "layers": config.model.num_hidden_layers}
    found |= {key: evaluation.get(key) for key in ("loss/val", "bits_per_byte")}
    found["tokens"] = last.get("tokens")
    for key in ("tokens_per_s", "mfu"):
        if values := [r[key] for r in train if r.get(key) is not None]:
            found[key] = statistics.median(values)
    if wall_s:
        found |= {"wall_s": wall_s, "goodput": spent["steps"] / wall_s}
    return found | {"cost": paid_s / 3600 * config.run.price_per_hour or None}


def facts_of(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the facts of runs by their names, lowest validation loss first."""
    found = [facts(folder, name) for name, folder in folders.items()]
    return sorted(found, key=lambda f: (f["loss/val"] is None, f["loss/val"] or 0.0, f["run"]))


def runs_below(folder: str) -> dict[str, Path]:
    """Return the folders of all runs below one. Raises ConfigError if there are none."""
    found = {}
    for path, folders, files in os.walk(folder):
        if "config.toml" in files:
            found[os.path.relpath(path, folder)] = Path(path)
            folders.clear()
    if not found:
        raise ConfigError(f"--runs {folder}: no runs are below this folder. Use --runs runs.")
    return found


def table(rows: Iterable[dict[str, Any]], names: Sequence[str] = OF_SEVERAL) -> list[list[str]]:
    """Return the heading and the cells of these facts of runs."""
    texts = [["-" if row[n] is None else COLUMNS[n][1](row[n]) for n in names] for row in rows]
    return [[COLUMNS[n][0] for n in names], *texts]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with columns of equal width: two of text, and the others of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(text.format(*row) for row in rows)


# --- what differs ---------------------------------------------------------------------------------


def differing(configs: Sequence[Config]) -> list[str]:
    """Return the names of settings that differ, and first those that decide what a run learns."""
    found = {n: {utils.get(config, n) for config in configs} for n in utils.settings_of()}
    names = [n for n in found if len(found[n]) > 1 and n not in ("run.name", "run.dir")]
    return sorted(names, key=lambda name: name.split(".")[0] not in DECISIVE)


def brief(names: Sequence[str]) -> list[str]:
    """Return names of settings without their sections, where that is clear."""
    last = [name.rpartition(".")[2] for name in names]
    return [n if last.count(b) > 1 else b for n, b in zip(names, last, strict=True)]


def labels(names: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return what to call each run in a legend: the settings that differ, and its name if these are
    not unique.
    """
    differ = differing(configs)[:MOST_NAMES]
    pairs = [*zip(brief(differ), differ, strict=True)]
    found = [", ".join(f"{b} {utils.get(c, n)!s:.40}" for b, n in pairs) for c in configs]
    if len(set(found)) == len(found) > 1:
        return found
    return [": ".join(filter(None, both)) for both in zip(names, found, strict=True)]


# --- the page -------------------------------------------------------------------------------------

HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><style>
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:68rem;margin:auto;padding:1rem;
 color:light-dark(#1b1d21,#dfe2e7);background:light-dark(#fff,#15171b)}
h1{overflow-wrap:anywhere;line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid var(--line)}
.facts,.pictures{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr))}
.pictures{grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
.facts div,pre{background:var(--soft);border-radius:.5rem;padding:.5rem .8rem}
.facts b{display:block;font-size:1.2rem}body{font-variant-numeric:tabular-nums}
figure,.scroll{margin:0;overflow-x:auto}.wide{grid-column:1/-1}img{width:100%}
table{border-collapse:collapse;font-size:.9rem}td,th{padding:.2rem .9rem .2rem 0;text-align:left;
 vertical-align:top;border-bottom:1px solid var(--line)}td:first-child,th{white-space:nowrap}
pre{margin:.5rem 0;font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){img{filter:invert(1) hue-rotate(180deg);mix-blend-mode:screen}}
@media print{:root{color-scheme:light}img{filter:none;mix-blend-mode:normal}h2{break-after:avoid}
 body{max-width:none;padding:0}figure,pre,tr,.facts div{break-inside:avoid}}
</style><meta name="viewport" content="width=device-width,initial-scale=1">"""


def page(title: str, sections: Mapping[str, str]) -> bytes:
    """Return a page; sections are HTML by their headings, and empty ones are left out."""
    body = "\n".join(f"<h2>{heading}</h2>\n{text}" for heading, text in sections.items() if text)
    text = f"{HEAD}\n<title>{escape(title)}</title>\n<h1>{escape(title)}</h1>\n{body}\n"
    return text.encode("utf-8", "xmlcharrefreplace")


def html_table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"<tr><th>{'<th>'.join(map(escape, heading))}"]
    lines += [f"<tr><td>{'<td>'.join(map(escape, row))}" for row in rows]
    return f"<div class=scroll><table>{''.join(lines)}</table></div>" if lines[1:] else ""


def record_html(records: Iterable[dict[str, Any]]) -> str:
    return html_table(("key", "value"), ((k, str(v)) for r in records for k, v in r.items()))


def preformatted(texts: Iterable[str]) -> str:
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts)


def pictures_html(pictures: Mapping[str, bytes]) -> str:
    """Return PNGs, by their names, in a grid. A wide one has a row of its own, and may scroll."""
    found = "<div class=pictures>"
    for name, png in pictures.items():
        width, data = int.from_bytes(png[16:20], "big"), base64.b64encode(png).decode()
        found += f"<figure{' class=wide' * (width > 1200)}><img alt='{name.replace('_', ' ')}' "
        found += f"style='min-width:{width // 3}px' src='data:image/png;base64,{data}'></figure>\n"
    return f"{found}</div>"


def of_run(folder: Path, url: str, pictures: Mapping[str, bytes]) -> bytes:
    """Return the page of one run, whose path or URL is `url`, with PNGs by their names."""
    config, found = cli.load(folder / "config.toml"), facts(folder, url)
    names = [name for name in COLUMNS if name != "run" and found[name] is not None]
    boxes = zip(*table([found], names), strict=True)
    boxes = "".join(f"<div>{heading}<b>{escape(text)}</b></div>" for heading, text in boxes)
    goodput = [phases.summary(lines)] if (lines := phases.read(folder)) else []
    starts = jsonl.read(folder / "starts.jsonl")
    command = [shlex.join(["./run.sh", "python", *start.pop("command")]) for start in starts[-1:]]
    starts = [{k: v for k, v in s.items() if k not in ("host", "environment")} for s in starts[-1:]]
    samples = jsonl.read(folder / "samples.jsonl")[: -MOST_SAMPLES - 1 : -1]
    run, commands = run_directory.at(url), []
    if run.has_checkpoints():
        commands = resume.next_commands(run, config, found["state"] == "finished")
    settings = [(n, utils.get(config, n), s.default) for n, s in utils.settings_of().items()]
    changed = [[n, str(value), str(default)] for n, value, default in settings if value != default]
    sections = {
        "Summary": f"<div class=facts>{boxes}</div>{preformatted(goodput)}",
        "Pictures": pictures_html(pictures),
        "Samples": preformatted(map(as_log, samples)),
        "Last evaluation": record_html(records_of(folder)[1][-1:]),
        "How to continue": preformatted(commands),
        "Command": preformatted(command),
        "Settings that differ from the defaults": html_table(("name", "value", "default"), changed),
        "Last start": record_html(starts),
    }
    return page(f"Run {url}", sections)


def of_runs(folders: Mapping[str, Path], title: str, pictures: Mapping[str, bytes]) -> bytes:
    """Return the page that compares runs, by their names, with PNGs by theirs."""
    configs = {name: cli.load(folder / "config.toml") for name, folder in folders.items()}
    differ = differing([*configs.values()])
    heading, *rows = table(facts_of(folders))
    rows = [[*row, *(str(utils.get(configs[row[0]], name)) for name in differ)] for row in rows]
    runs = html_table([*heading, *brief(differ)], rows)
    return page(title, {"Runs": runs, "Pictures": pictures_html(pictures)})
