"""The text of the guide: terms are introduced, numbers have a source, commands exist."""

import functools
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT
from runtime import cli

GUIDE = ROOT / "guide"
INDEX = (GUIDE / "index.md").read_text()
PAGES = re.search(r"```\{toctree\}.*?\n\n(.*?)```", INDEX, re.S)[1].split()  # in reading order
TEXTS = {page: (GUIDE / f"{page}.md").read_text() for page in ("index", *PAGES)}


# --- terms ----------------------------------------------------------------------------------------


def glossary():
    block = re.search(r"```\{glossary\}\n(.*?)```", TEXTS["glossary"], re.S)[1]
    return [term for line in re.findall(r"^\S.*$", block, re.M) for term in line.split(", ")]


def words_of(term):
    """A pattern of the term, its plural, and `rank` but not `rank-` or `ranked`."""
    stem = re.escape(term).replace(r"\ ", r"\s+")
    stem = {"axis": "ax[ie]s", "residual": r"residuals?(?! connection)"}.get(
        term, stem + "(?:e?s)?"
    )
    return rf"(?<![\w-]){stem}(?![\w-])"


def prose(text):
    """Text without code blocks, tables, headings and options of directives."""
    lines = re.sub(r"```.*?```|^(?:\||#|:|\+\+\+).*?$", "", text, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", lines)


@pytest.mark.parametrize("term", glossary())
def test_the_first_use_of_a_term_introduces_it_or_leads_to_the_glossary(term):
    for page in PAGES:
        text = prose(TEXTS[page])
        if (found := re.search(words_of(term), text, re.I)) and page != "glossary":
            line = text[max(0, found.start() - 60) : found.end() + 20]
            # *term*, `axis` in a definition, {term}`term` or {term}`other form <term>`
            assert re.search(r"[*`]$|\{term\}`[^`]*$", text[: found.start()]), f"{page}: {line}"
            return
    pytest.fail(f"no page uses {term}")


# --- numbers --------------------------------------------------------------------------------------

UNITS = "[KMGT]i?B|ms|s|seconds?|minutes?|hours?|days?|weeks?|FLOPs|tokens/s|[MGT]bit/s"

# Numbers that describe no measurement: a supposed size, and the setting of a link.
GIVEN = {"dataset": {"1 TB"}, "schedules": {"100 Mbit/s"}}


def numbers(page):
    text = re.sub(r"^(:{3,})\{problem\}.*?^\1$", "", TEXTS[page], flags=re.S | re.M)
    text = re.sub(r"\{fact\}`[^`]+`", "", text)
    return set(re.findall(rf"\d[\d,.]* (?:(?:million|billion) )?(?:%|(?:{UNITS})\b)", prose(text)))


@pytest.mark.parametrize("page", TEXTS)
def test_a_number_with_a_unit_is_a_fact(page):
    """In problems it may be chosen freely. Tables are not read."""
    assert numbers(page) == GIVEN.get(page, set())


# --- commands -------------------------------------------------------------------------------------


def commands():
    found = {}
    for page, text in TEXTS.items():
        lines = re.findall(r"^\./.*$", text, re.M) + re.findall(r"`(\./[^`]*)`", text)
        found |= {f"{page}: {line[:70]}": line for line in lines}
    return found


@functools.cache
def help_of(*program):
    done = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_flags(arguments, *program):
    for word in arguments:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word)}\b", help_of(*program)), f"no {word}: {program}"


def check_python(arguments):
    file, *rest = arguments
    if file == "-c":
        subprocess.run([sys.executable, "-c", *rest], cwd=ROOT, check=True)
    elif file == "main.py":
        cli.parse(rest)
    else:
        check_flags(rest, sys.executable, file)


@pytest.mark.parametrize("line", commands().values(), ids=commands())
def test_a_command_of_a_page_exists_and_takes_its_flags(line):
    program, *words = shlex.split(line)
    if program == "./launcher.sh":
        cut = words.index("--") if "--" in words else len(words)
        check_flags(words[:cut], "bash", program)
        if cut < len(words):
            assert words[cut + 1] == "python"
            check_python(words[cut + 2 :])
    elif words[:1] == ["python"]:
        check_python(words[1:])
    elif words[:1] != ["pytest"]:
        assert program == "./run.sh"
        cli.parse(words)  # run.sh starts main.py


def test_tests_that_a_page_names_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert len(named) > 10
    assert not {name for name in named if f"def {name}(" not in tests}


def test_there_are_commands_of_each_kind():
    found = " ".join(commands().values())
    for part in ("./launcher.sh", "main.py", "python -c", "plan.py", "./run.sh --run.name"):
        assert part in found
