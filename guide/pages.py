"""Read the pages of the guide: quoted code, and problems with their answers.

Only the standard library is imported, since the environment of Sphinx has no jax.
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MAX_LINES = 40  # of a quoted block


class PageError(Exception):
    """A fault of a page: what is wrong, and what to do."""


# --- quoted code ----------------------------------------------------------------------------------


class Excerpt(NamedTuple):
    line: int  # of its first line in the file, from 1
    text: str


def excerpt(file: str, name: str) -> Excerpt:
    """Return the code of a function, class or constant of a file below the root.

    name    as `loss`; of a method, as `Schedule.ticks`.
    Raises  PageError if it does not exist, or is longer than MAX_LINES.
    """
    path = ROOT / file
    if not path.is_file():
        raise PageError(f"{file} does not exist. Name a file below {ROOT.name}/.")
    source = path.read_text()
    found: ast.AST | None = ast.parse(source)
    for part in name.split("."):
        body = getattr(found, "body", [])
        found = next((node for node in body if part in _names(node)), None)
    if found is None:
        raise PageError(f"{file} has no definition {name!r}.")
    first = min(node.lineno for node in (found, *getattr(found, "decorator_list", [])))
    lines = source.splitlines()[first - 1 : found.end_lineno]
    if len(lines) > MAX_LINES:
        raise PageError(
            f"{file} {name} has {len(lines)} lines, and a quoted block {MAX_LINES} at most. Quote "
            "a smaller function."
        )
    return Excerpt(first, textwrap.dedent("\n".join(lines)))


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def number(page: str) -> int:
    """Return the number of a chapter, from its title. Raises PageError if it has none."""
    path = FOLDER / f"{page}.md"
    title = re.match(r"# (\d+)\. ", path.read_text()) if path.is_file() else None
    if not title:
        raise PageError(f"guide/{page}.md is not a chapter. Name one of the toctree of index.md.")
    return int(title[1])


def minutes(page: str) -> int:
    """Return the minutes of reading of a page: one for 220 words or 30 lines of quoted code."""
    text = (FOLDER / f"{page}.md").read_text()
    quoted = (excerpt(*names).text for names in re.findall(r"\{code\} (\S+) (\S+)", text))
    return round(len(text.split()) / 220 + sum(code.count("\n") + 1 for code in quoted) / 30)


# --- problems -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A problem of a page. It has an answer, or is solved by code."""

    number: str  # as 3.2
    page: str
    answer: str  # Python expression over guide/answers.py; empty for a coding problem
    code: str  # name of the stub in guide/problems; empty for a question
    accept: str  # relative error that is accepted, for a real number


def problems() -> dict[str, Problem]:
    """Return the problems of all pages by their numbers. Raises PageError for a malformed one."""
    found: dict[str, Problem] = {}
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text()
        for block in re.finditer(r"^(:{3,})\{problem\} (\S+)\n(.*?)^\1$", text, re.M | re.S):
            number, content = block[2], block[3]
            options = dict(re.findall(r"^:(\w+): (.*)$", content, re.M))
            given = options.keys() & {"answer", "code"}
            if len(given) != 1:
                raise PageError(f"{path.name}: problem {number} needs one of :answer: and :code:.")
            if number in found:
                raise PageError(f"{path.name}: there are two problems {number}.")
            found[number] = Problem(
                number,
                path.stem,
                options.get("answer", "").strip("`"),
                options.get("code", ""),
                options.get("accept", "0.01"),
            )
    return found


# What a page uses: a fact, a figure (also of a widget), and a table of guide/figures.py.
USES = {
    "fact": r"\{fact\}`([^`]+)`",
    "figure": r"(?:\{svg\}|^:figure:) (\S+)",
    "table": r"\{made-table\} (\S+)",
}


def used(kind: str) -> dict[str, list[str]]:
    """Return {name: pages that use it}. kind  of USES."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.md")):
        for name in re.findall(USES[kind], path.read_text(), re.M):
            found.setdefault(name, []).append(path.name)
    return found
