"""Measure the sentences of documents and docstrings, and refuse phrases that have a standard term.

    ./run.sh python tests/lint_prose.py           all tracked files
    ./run.sh python tests/lint_prose.py FILE ..   only these

Prints FILE:LINE, the reason and the sentence of each finding. Exit code 1 if there is one.

Words are counted outside code blocks, tables, headings and indented lines. Inline code is one word.
A sentence ends at . ! or ? before a space, at a blank line, and where a list item or a field of a
docstring begins. Fewer than three words are no sentence. Phrases are also found in comments,
strings, tables and shell scripts, but not in code blocks of Markdown. In Markdown a line that was
wrapped before - or another marker is found too, since it begins a list or a quotation.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
QUOTED = re.compile(r"[a-zA-Z]*('''|\"\"\"|'|\")(.*)\1$", re.DOTALL)  # a string of Python
SUFFIXES = (".md", ".py", ".sh")
NO_PROSE = ("|", "#", "![", "<", ":", "+++")  # begins of lines; : and +++ are of directives
LONG_WORDS, MAX_WORDS = 28, 40  # of a sentence


class Bounds(NamedTuple):
    """Most words of a sentence on average and at all, and the largest share of long sentences."""

    mean: float
    long_share: float = 1.0
    longest: int = MAX_WORDS


README, DOCUMENT, GUIDE = Bounds(15.0, 0.06), Bounds(17.0), Bounds(18.0, 0.08, 35)

PHRASES = {
    r"(?:is|are|was|were|be|been)\s+told": "is reported, is logged, receives",
    r"tells?\s+of": "describe, report",
    r"(?:go|goes|going|gone|went)\s+on\s+(?:from|with|behind|where)": "resume, continue from",
    r"men(?:d|ds|ded|ding)": "fix",
    r"puts?\s+aside": "quarantine",
    r"pretend\s+(?:devices?|hosts?)": "simulated devices, simulated hosts",
    r"spread\s+experts": "expert parallelism",
    r"gathered\s+experts": "experts sharded like other weights",
    r"(?:made|makes?)\s+(?:again|anew)": "recomputed, created again",
    r"by\s+itself\s+alone": "alone",
    r"ask(?:s|ed|ing)?\s+for": "requested, if enabled",
    r"look(?:s|ed|ing)?\s+at": "inspect, read",
    r"kept\s+for\s+the\s+backward\s+pass": "saved residuals",
    r"parts?\s+of\s+(?:a|the)\s+sum": "partial sum",
    r"chunks?\s+of\s+layers": "model chunk, virtual stage",
    r"room\s+(?:at|for|of)\s+(?:an|each|the)\s+(?:experts?|slots?)": "capacity",
    r"far\s+rates?": "learning rate far outside the tuned range",
    r"texts?\s+go(?:es)?\s+on": "completion",
    r"before\s+(?:it|you)\s+(?:is\s+)?book(?:ed)?": "capacity planning",
    r"whole\s+(?:checkpoints?|files?)": "complete, committed",
}
REFUSED = [(re.compile(rf"\b{words}\b", re.IGNORECASE), term) for words, term in PHRASES.items()]


class Sentence(NamedTuple):
    line: int  # of its first word, from 1
    words: int
    text: str


def replaced(pattern: str, word: str, text: str) -> str:
    """Replace what matches by a word and as many line breaks as it has."""
    return re.sub(pattern, lambda m: word + "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def without_code_blocks(text: str) -> str:
    return replaced(r"```.*?(?:```|\Z)", "", text)


def prose_lines(text: str) -> Iterator[str]:
    """Yield each line of Markdown as prose: without code, tables and headings.

    An item of a list begins with an empty word, which ends the sentence before it.
    """
    text = replaced(r"\]\([^)]*\)", "]", without_code_blocks(text))
    text = replaced(r"`[^`]*`", "CODE", text)
    for line in text.split("\n"):
        # Lines that begin with : are options of a directive, and fences, in the guide.
        if line.lstrip().startswith(NO_PROSE) or re.match(r" {4,}\S", line):
            yield ""
        elif item := re.match(r"\s*(?:[-*]|\d+\.)\s+(.*)", line):
            yield f"\0 {item[1]}"
        elif re.match(r"\w\S*(?: \S+){0,2}  +\S", line):  # a field of a docstring: name, two spaces
            yield f"\0 {line}"
        else:
            yield line


def sentences(text: str, first: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of Markdown whose first line has the number `first`."""
    words: list[str] = []
    start = first
    for number, line in enumerate([*prose_lines(text), ""], first):
        parts = line.split()
        for word in parts or ["\0"]:
            if word != "\0":
                start = start if words else number
                words.append(word)
            if word == "\0" or re.search(r"[.!?][\"')]*$", word):
                if len(words) >= 3:
                    yield Sentence(start, len(words), " ".join(words))
                words = []


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, docstring without indentation)."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (cleaned := ast.get_docstring(node)):
            raw = node.body[0].value.value
            skipped = raw[: len(raw) - len(raw.lstrip())].count("\n")
            yield node.body[0].lineno + skipped, cleaned


def python_text(text: str) -> str:
    """Return comments and contents of strings, each on its line; | stands for code between them."""
    lines = [""] * (text.count("\n") + 2)
    silent = {"NL", "NEWLINE", "INDENT", "DEDENT", "FSTRING_START", "FSTRING_END", "ENDMARKER"}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name, content = tokenize.tok_name[token.type], "|"
        if name == "STRING":
            content = re.sub(r"\{[^{}]*\}", "CODE", QUOTED.match(token.string)[2])
        elif name in ("FSTRING_MIDDLE", "COMMENT"):  # the former from Python 3.12
            content = token.string.lstrip("#")
        if name not in silent:
            for line, part in enumerate(content.split("\n"), token.start[0] - 1):
                lines[line] += part
    return "\n".join(lines)


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, reason, sentence) of each refused phrase."""
    for pattern, term in REFUSED:
        for match in pattern.finditer(text):
            before = re.split(r"[.!?|]\s|\n\s*\n|\|", text[: match.start()])[-1]
            after = re.split(r"(?<=[.!?])\s|\n\s*\n|\|", text[match.end() :], maxsplit=1)[0]
            found = " ".join(match[0].split())
            sentence = " ".join(f"{before}{match[0]}{after}".split())
            yield text.count("\n", 0, match.start()) + 1, f"{found!r}: write {term}", sentence


MARKER = re.compile(r" {0,3}(?:[-*+>]|1[.)]|#{1,6})\s")  # begins a list, quotation or heading


def markers(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, reason, text) of each marker that continues a paragraph of Markdown."""
    before, in_list = "", False
    for number, line in enumerate(without_code_blocks(text).split("\n"), 1):
        marked = MARKER.match(line)
        if marked and before.strip() and not in_list and not before.startswith((*NO_PROSE, "    ")):
            yield number, "begins a list or heading within a paragraph", line
        in_list, before = bool(line.strip() and (marked or in_list)), line


def bounds_of(path: Path) -> Bounds | None:
    """Return the bounds of a Markdown file; None for other files."""
    of_page = GUIDE if path.parent == ROOT / "guide" else DOCUMENT
    of_document = README if path.name == "README.md" else of_page
    return of_document if path.suffix == ".md" else None


def findings(path: Path) -> list[tuple[Path, int, str, str]]:
    """Return (path, line, reason, sentence) of what is wrong with one file."""
    text, bounds = path.read_text(), bounds_of(path)
    if bounds:
        measured, searched = [*sentences(text)], without_code_blocks(text)
    elif path.suffix == ".py":
        measured = [s for line, doc in docstrings(text) for s in sentences(doc, line)]
        searched = python_text(text)
    else:  # lines of comments that follow each other are one text
        measured, searched = [], re.sub(r"(?m)^\s*#+", " ", text)
    most = bounds.longest if bounds else MAX_WORDS
    long = [s for s in measured if s.words > most]
    found = [(s.line, f"{s.words} words, more than {most}", s.text) for s in long]
    found += phrases(searched)
    if bounds:
        found += markers(text)
    if bounds and measured:
        mean = statistics.fmean(s.words for s in measured)
        share = sum(s.words > LONG_WORDS for s in measured) / len(measured)
        longest, reasons = max(measured, key=lambda s: s.words), []
        if mean > bounds.mean:
            reasons = [f"{mean:.1f} words a sentence on average, more than {bounds.mean:g}"]
        if share > bounds.long_share:
            above = f"{share:.0%} of sentences above {LONG_WORDS} words"
            reasons.append(f"{above}, more than {bounds.long_share:.0%}")
        found += [(longest.line, reason, longest.text) for reason in reasons]
    return [(path, *each) for each in found]


def tracked_files(root: Path) -> list[Path]:
    """Return the files to check: what git has or would add, without what is generated."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [root / name for name in sorted({*listed.split("\0")} - {""})]
    return [path for path in paths if path.suffix in SUFFIXES or path == root / ".ci/run"]


def main(names: Iterable[str]) -> None:
    paths = [Path(name).resolve() for name in names] or tracked_files(ROOT)
    found = [finding for path in paths for finding in findings(path)]
    for path, line, reason, sentence in sorted(found):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}:{line}: {reason}: {sentence}")
    print(f"{len(paths)} files, {len(found)} findings")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(sys.argv[1:])
