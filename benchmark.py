"""Measure what training steps, checkpoints, data and text cost.

    ./run.sh python benchmark.py NAME           run a benchmark
    ./run.sh python benchmark.py NAME --help    its method and its flags

Machines are noisy: compare ratios within one run. docs/measured.md has results.
"""

import ast
import importlib
import sys
from pathlib import Path

from runtime import errors
from utils import ConfigError

FOLDER = Path(__file__).with_name("benchmarks")
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common"))


def help_text() -> str:
    """Return the docstring, and the first line of each benchmark's docstring."""
    lines = [__doc__]
    for name in NAMES:
        # Parsed and not imported, because a benchmark may need optional packages.
        doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
        lines.append(f"  {name:12}{doc.splitlines()[0]}")
    return "\n".join(lines)


def run() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
    elif name in NAMES:
        importlib.import_module(f"benchmarks.{name}").main(rest)
    else:
        raise ConfigError(f"benchmark.py {name} is unknown. Use one of {', '.join(NAMES)}.")


if __name__ == "__main__":
    errors.run_command(run)
