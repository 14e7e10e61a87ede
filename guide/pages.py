"""Read the pages of the guide: quoted code, and problems with their answers.

Only the standard library is imported, since the environment of Sphinx has no jax.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MAX_LINES = 40  # of a quoted block


class PageError(Exception):
    """A fault of a page: what is wrong, and what to do."""


# --- quoted code ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excerpt:
    file: str  # below the root
    line: int  # of its first line, from 1
    text: str

    @property
    def lines(self) -> int:
        return self.text.count("\n") + 1


def excerpt(file: str, name: str) -> Excerpt:
    """Return the code of a function or class, or of a mark `# guide: NAME`.

    name    of a function, class or constant, as `loss`; of a method, as `Schedule.ticks`; or, if
            there is no such definition, of a mark.
    Raises  PageError if it does not exist, or is longer than MAX_LINES.
    """
    path = ROOT / file
    if not path.is_file():
        raise PageError(f"{file} does not exist. Name a file below {ROOT.name}/.")
    source = path.read_text()
    found = _defined(source, name) or _marked(source, name)
    if not found:
        raise PageError(f"{file} has no mark `# guide: {name}` and no definition {name!r}.")
    first, last = found
    lines = source.splitlines()[first - 1 : last]
    if len(lines) > MAX_LINES:
        raise PageError(
            f"{file} {name} has {len(lines)} lines, and a quoted block {MAX_LINES} at most. Quote "
            "a smaller function, or mark a part of it."
        )
    indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    return Excerpt(file, first, "\n".join(line[indent:] for line in lines))


def _marked(source: str, name: str) -> tuple[int, int] | None:
    """Return the first and last line between `# guide: NAME` and its end, without blank lines."""
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if line.strip() == f"# guide: {name}":
            end = next(n for n in range(number, len(lines)) if lines[n].strip() == "# guide: end")
            inside = [n for n in range(number + 1, end) if lines[n].strip()]
            return inside[0] + 1, inside[-1] + 1
    return None


def _defined(source: str, name: str) -> tuple[int, int] | None:
    """Return the first and last line of a function, class or assignment, with its decorators."""
    body: list[ast.stmt] = ast.parse(source).body
    found = None
    for part in name.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    decorators = getattr(found, "decorator_list", [])
    return min([found.lineno, *(d.lineno for d in decorators)]), found.end_lineno


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


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


def facts_used() -> dict[str, list[str]]:
    """Return {name of a fact: pages that show it}."""
    used: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.md")):
        for name in re.findall(r"\{fact\}`([^`]+)`", path.read_text()):
            used.setdefault(name, []).append(path.name)
    return used
