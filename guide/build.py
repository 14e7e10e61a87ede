"""Build the guide: ./run.sh python guide/build.py

    guide/build.py              guide/site/index.html, from the pages, the code and facts.json
    guide/build.py --pdf        also guide/site/guide.pdf, with all answers, by Chromium
    guide/build.py --check      also inspect each page in Chromium, at three widths, light and dark
    guide/build.py --refresh    compute all facts and write facts.json
    guide/build.py --serve      build, and serve the site on this machine

Sphinx and its packages are installed in .cache/guide (guide/requirements.txt). The answers of
problems and the facts are computed here, with the packages of a run, and handed to Sphinx as files.
A fault of a page ends the build with exit code 2 and one line.
"""

import argparse
import dataclasses
import functools
import http.server
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import answers
import facts
import figures
import numpy as np
import pages
from answers import Schedule

import attention
import dataset
import hardware
from hf import model_config
from utils import MESH_AXES
from weights import Size

FOLDER, ROOT = pages.FOLDER, pages.ROOT
CACHE = ROOT / ".cache/guide"
SITE = FOLDER / "site"
PYTHON = CACHE / "environment/bin/python"
DATA = CACHE / "data"


def install() -> None:
    """Create the environment of Sphinx, or update it if guide/requirements.txt has changed."""
    wanted, installed = FOLDER / "requirements.txt", CACHE / "installed.txt"
    if installed.exists() and installed.read_text() == wanted.read_text():
        return
    uv = [sys.executable, "-m", "uv"] if not shutil.which("uv") else ["uv"]
    environment = str(PYTHON.parent.parent)
    for command in (
        [*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, environment],
        [*uv, "pip", "install", "--quiet", "--python", str(PYTHON), "-r", str(wanted)],
    ):
        if subprocess.run(command).returncode:
            raise pages.PageError(
                f"{' '.join(command)} failed. Fix the cause above, and start again."
            )
    installed.write_text(wanted.read_text())


def write_data() -> None:
    """Write facts, answers and figures for Sphinx."""
    import check

    for kind in ("figures", "tables"):
        (DATA / kind).mkdir(parents=True, exist_ok=True)
    shown = {
        problem.number: check.describe(answers.evaluate(problem))
        for problem in pages.problems().values()
        if problem.answer
    }
    (DATA / "facts.json").write_text(json.dumps(facts.check(pages.facts_used())))
    (DATA / "answers.json").write_text(json.dumps(shown))
    (DATA / "mesh.json").write_text(json.dumps(mesh_data()))
    (DATA / "plan.json").write_text(json.dumps(answers.plans()))
    (DATA / "roofline.json").write_text(json.dumps(roofline_data()))
    (DATA / "routings.json").write_text(json.dumps([*routings()]))
    singular = [(value, answers.polynomial(value)) for value in np.geomspace(1e-3, 1, 50)]
    (DATA / "singular_values.json").write_text(json.dumps(singular))
    (DATA / "cache.json").write_text(json.dumps(cache_data()))
    (DATA / "merges.json").write_text(json.dumps({w: answers.merges(w) for w in WORDS}))
    (DATA / "permutation.json").write_text(json.dumps(permutation_keys()))
    (DATA / "permutations.json").write_text(json.dumps([*permutations()]))
    (DATA / "schedules.json").write_text(json.dumps([*schedules()]))
    for name, make in figures.TABLES.items():
        (DATA / "tables" / f"{name}.html").write_text(make())
    for name, draw in figures.FIGURES.items():
        (DATA / f"figures/{name}.svg").write_text(draw())


def schedules() -> Iterator[tuple[int, int, int, int]]:
    """Yield (pipeline, virtual, microbatches, digest of ticks, bubble and tasks), to compare with
    guide/static/schedule.js.
    """
    for pipeline, virtual, microbatches in itertools.product(
        range(1, 9), range(1, 5), range(1, 33)
    ):
        if virtual > 1 and microbatches % pipeline:
            continue
        s = Schedule(pipeline, virtual, microbatches)
        slots = sum((end - first) * (fwd + bwd) for first, end, fwd, bwd in s.phases)
        found = [s.ticks, [slots - 2 * s.tasks_per_rank, slots]]
        found += [s.tasks_at(tick, rank) for rank in range(pipeline) for tick in range(s.ticks)]
        digest = 0x811C9DC5
        for byte in json.dumps(found, separators=(",", ":")).encode():  # FNV-1a
            digest = (digest ^ byte) * 0x01000193 % 2**32
        yield pipeline, virtual, microbatches, digest


WORDS = (" return", " function", " self", " yield", " numpy", " tokenization", "def", " isinstance")
SEEDS, EPOCHS = range(4), range(4)


def permutation_keys() -> dict[str, list[str]]:
    """Return {"seed epoch": round keys}, for a widget that has no numpy."""
    found = {}
    for seed, epoch in itertools.product(SEEDS, EPOCHS):
        keys = np.random.SeedSequence([seed, epoch]).generate_state(
            dataset.FEISTEL_ROUNDS, np.uint64
        )
        found[f"{seed} {epoch}"] = [str(key) for key in keys]
    return found


def permutations() -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield (size, seed, epoch, order), to compare with guide/static/permutation.js."""
    for size, seed, epoch in itertools.product((1, 2, 3, 5, 17, 64, 100, 257), SEEDS, EPOCHS):
        order = dataset.permute(np.arange(size), size, seed, epoch)
        yield size, seed, epoch, order.tolist()


def roofline_data() -> dict[str, dict[str, float]]:
    """Return the figures of chips, for a widget."""
    names = {"TPU v4": "v4", "TPU v5p": "v5p", "TPU v6e": "v6e", "A100": "a100", "H100": "h100"}
    chips = {shown: hardware.chip_named(name) for shown, name in names.items()}
    return {
        name: {"flops": chip.flops, "bandwidth": chip.memory_bandwidth}
        for name, chip in chips.items()
    }


def routings() -> Iterator[tuple[list[list[int]], int, int, int, list[list[int]], int]]:
    """Yield (choices, experts, capacity, tile, slots, tiles), to compare with dispatch.js."""
    rng = np.random.default_rng(0)
    for number in range(200):
        if number % 10 == 0:  # JAX compiles for each size
            experts, K = int(rng.integers(2, 9)), int(rng.integers(1, 3))
            tokens, capacity, tile = (int(n) for n in rng.integers(1, (33, 9, 6)))
        popular = rng.dirichlet(np.ones(experts))
        choices = [
            rng.choice(experts, K, replace=False, p=popular * 0.9 + 0.1 / experts).tolist()
            for _ in range(tokens)
        ]
        slots = answers.assigned(choices, experts, capacity)
        yield choices, experts, capacity, tile, slots, answers.tiles_of(choices, experts, tile)


def cache_data() -> dict[str, dict[str, int]]:
    """Return, for a widget, layers and cached numbers of some models. Two are published configs."""
    found = {}
    for name in figures.CACHES:
        layers = answers.config_of(name).model.num_hidden_layers
        found[name] = {
            "layers": layers,
            "cached": answers.cached_values(name),
            "plain": answers.plain_values(name),
        }
    published = json.loads((ROOT / "tests/published.json").read_text())
    for name in ("deepseek-v3", "kimi-k2"):
        m = model_config.from_hf(published[name], Path(f"{name}/config.json")).model
        kind = attention.kind_of(m)
        found[name] = {
            "layers": m.num_hidden_layers,
            "cached": sum(array.heads * array.width for array in kind.cache(m, 1)),
            "plain": m.num_attention_heads * sum(kind.widths(m)),
        }
    return found


def mesh_data() -> dict[str, Any]:
    """Return the slices of some weights of configs/tiny.toml on (2, 2, 2), for a widget."""
    config = answers.config_of("tiny", 2, 2, 2)
    devices = [*itertools.product(range(2), repeat=3)]
    named = {
        "first.embedding": "V D",
        "blocks.dense.attention.kv_down": "D C+R",
        "blocks.dense.attention.out": "N W D",
        "blocks.dense.mlp.gate": "D F",
        "blocks.dense.mlp.down": "F D",
        "blocks.dense.mlp.norm": "D",
        "blocks.moe.moe.experts.gate": "E D G",
        "blocks.moe.moe.router": "D E",
    }
    found = {}
    for name, dims in named.items():
        weight, own = answers.weights_of(config)[name], dims.split()
        if name.startswith("blocks"):  # stacked [virtual, stage, block, ...]
            own = ["stage", *own]
        shape = (
            [weight.shape[1], *weight.shape[-len(own) + 1 :]] if own[0] == "stage" else weight.shape
        )
        axes = weight.dim_axes if own[0] != "stage" else [
            weight.dim_axes[1], *weight.dim_axes[-len(own) + 1 :]
        ]  # fmt: skip
        shown = dataclasses.replace(
            weight,
            dim_axes=tuple(axes),
            sizes=tuple(Size(size, "") for size in shape),
        )
        slices, lines = [], []
        for device in devices:
            at = dict(zip(MESH_AXES, (0, *device), strict=True))
            slices.append(answers.slices_of(shown, config, at))
            parts = [
                f"{dim} {first} to {end - 1}" if end - first > 1 else f"{dim} {first}"
                for dim, (first, end), size in zip(own, slices[-1], shape, strict=True)
                if end - first < size
            ]
            lines.append(parts or ["all of it"])
        layout = " ".join(
            f"{dim}/{'+'.join(axes)}" if axes else dim
            for dim, axes in zip(own, shown.dim_axes, strict=True)
        )
        found[name] = {
            "shape": [*shape], "dims": " x ".join(own), "layout": layout, "slices": slices,
            "lines": lines,
        }  # fmt: skip
    return {"devices": devices, "weights": found}


def sphinx(builder: str, folder: Path) -> None:
    """Run Sphinx with warnings as errors."""
    command = [str(PYTHON), "-m", "sphinx", "-E", "-n", "-W", "--keep-going", "-q", "-b", builder]
    command += ["-d", str(CACHE / builder), str(FOLDER), str(folder)]
    run = subprocess.run(command, env=os.environ | {"GUIDE_DATA": str(DATA)})
    if run.returncode:
        raise pages.PageError("Sphinx found the faults above. Fix them, and start again.")


def browser() -> str:
    """Return the path of Chromium. Raises PageError if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not found:
        raise pages.PageError(
            "no Chromium was found. Install it, as by `apt-get install chromium`, or set CHROMIUM "
            "to its path."
        )
    return found


def inspect(arguments: list[str]) -> None:
    """Run guide/browser.py in the environment of Sphinx."""
    command = [str(PYTHON), str(FOLDER / "browser.py"), browser(), str(SITE), *arguments]
    if subprocess.run(command, env=os.environ | {"GUIDE_DATA": str(DATA)}).returncode:
        raise pages.PageError("the browser found the faults above.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("pdf", "check", "refresh", "serve"):
        parser.add_argument(f"--{name}", action="store_true")
    flags = parser.parse_args()
    if flags.pdf or flags.check:
        browser()  # before minutes of work
    if flags.refresh:
        facts.refresh()
    install()
    write_data()
    sphinx("html", SITE)
    if flags.pdf:
        sphinx("singlehtml", CACHE / "single")
        inspect(["--pdf", str(CACHE / "single/index.html"), str(SITE / "guide.pdf")])
    if flags.check:
        inspect([])
    print(f"open {os.path.relpath(SITE)}/index.html")
    if flags.serve:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
            print("serving http://127.0.0.1:8000, until Ctrl-C")
            server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except pages.PageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
