"""Build the guide: ./run.sh python guide/build.py

    guide/build.py              guide/site/index.html, from the pages, the code and facts.json
    guide/build.py --pdf        also guide/site/guide.pdf, with all answers, by Chromium
    guide/build.py --check      also inspect each page in Chromium, at four widths, light and dark
    guide/build.py --refresh    compute all facts and write facts.json
    guide/build.py --serve      build, and serve the site on this machine

Sphinx and its packages are installed in .cache/guide (guide/requirements.txt). The answers of
problems, the facts and the figures are computed here, with the packages of a run, and handed to
Sphinx in a file. A fault of a page ends the build with exit code 2 and one line.
"""

import argparse
import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages

FOLDER, ROOT = pages.FOLDER, pages.ROOT
CACHE = ROOT / ".cache/guide"
SITE = FOLDER / "site"
PYTHON = CACHE / "environment/bin/python"
DATA = CACHE / "data.json"
STATE = CACHE / "state.json"  # what DATA was computed from
DOCUMENTS = ("locks/*", "configs/*", "docs/*.md", "guide/*.json", "tests/*.json", "data/*.tiktoken")


def install() -> None:
    """Create the environment of Sphinx, or update it if guide/requirements.txt has changed."""
    wanted, installed = FOLDER / "requirements.txt", CACHE / "installed.txt"
    if installed.exists() and installed.read_text() == wanted.read_text():
        return
    uv = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    environment = str(PYTHON.parent.parent)
    run(*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, environment)
    run(*uv, "pip", "install", "--quiet", "--python", str(PYTHON), "-r", str(wanted))
    installed.write_text(wanted.read_text())


def site_data() -> None:
    """Write DATA, unless pages, code and documents are those from which it was computed."""

    def state(modules: list[str]) -> dict[str, Any]:
        files = sorted({*map(Path, modules), *(p for each in DOCUMENTS for p in ROOT.glob(each))})
        used = repr([pages.problems(), *map(pages.used, pages.USES)]).encode()
        content = used + b"".join(path.read_bytes() for path in files if path.is_file())
        return {"modules": modules, "digest": hashlib.sha256(content).hexdigest()}

    if DATA.exists() and STATE.exists():
        stored = json.loads(STATE.read_text())
        if stored == state(stored["modules"]):
            return
    import widgets  # late: it imports jax

    DATA.write_text(json.dumps(widgets.site_data()))
    loaded = {getattr(m, "__file__", None) or "" for m in list(sys.modules.values())}
    own = [f for f in loaded if f.startswith(f"{ROOT}/") and not f.startswith(f"{ROOT}/.")]
    STATE.write_text(json.dumps(state(sorted(own))))


def run(*command: str) -> None:
    """Run a command that prints its faults. Raises PageError if there is one."""
    if subprocess.run(command, env=os.environ | {"GUIDE_DATA": str(DATA)}).returncode:
        raise pages.PageError(f"{' '.join(command)} found the faults above. Fix them.")


def sphinx(builder: str, folder: Path) -> None:
    """Run Sphinx with warnings as errors."""
    options = ["-E", "-n", "-W", "--keep-going", "-q", "-b", builder, "-d", str(CACHE / builder)]
    run(str(PYTHON), "-m", "sphinx", *options, str(FOLDER), str(folder))


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


def inspect(*arguments: str) -> None:
    """Run guide/browser.py in the environment of Sphinx."""
    run(str(PYTHON), str(FOLDER / "browser.py"), browser(), str(SITE), *arguments)


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
        import facts  # late: it imports jax

        facts.refresh()
    install()
    site_data()
    sphinx("html", SITE)
    if flags.pdf:
        sphinx("singlehtml", CACHE / "single")
        inspect("--pdf", str(CACHE / "single/index.html"), str(SITE / "guide.pdf"))
    if flags.check:
        inspect()
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
