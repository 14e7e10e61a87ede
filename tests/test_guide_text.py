"""The text of the guide: terms are introduced, numbers have a source, tests exist."""

import re

import pytest

from conftest import ROOT

GUIDE = ROOT / "guide"
INDEX = (GUIDE / "index.md").read_text()
PAGES = re.search(r"```\{toctree\}.*?\n\n(.*?)```", INDEX, re.S)[1].split()  # in reading order
TEXTS = {page: (GUIDE / f"{page}.md").read_text() for page in ("index", *PAGES)}


def test_chapters_and_their_problems_are_numbered_in_reading_order():
    heads = [re.match(r"# (\d+)\. ", TEXTS[page]) for page in PAGES if page != "glossary"]
    assert [head and int(head[1]) for head in heads] == [*range(len(heads))]
    for number, page in enumerate(PAGES[: len(heads)]):
        found = re.findall(r"\{problem\} (\S+)", TEXTS[page])
        assert found == [f"{number}.{i}" for i in range(1, len(found) + 1)]


def test_a_chapter_is_not_called_a_part():
    pattern = r"\b[Pp]arts?\s+(?:\d|[A-E]\b)|\b[Tt]his part (?:answers|explains|has|is)\b"
    assert not {page: found for page, text in TEXTS.items() if (found := re.findall(pattern, text))}


def test_a_reference_to_a_chapter_takes_its_number_from_the_chapter():
    """{chapter}`experts` follows if chapters move."""
    pattern = r"\b[Cc]hapters?\s+\d+"
    assert not {page: found for page, text in TEXTS.items() if (found := re.findall(pattern, text))}


def prose(text):
    """Text without code blocks, tables, headings and options of directives."""
    lines = re.sub(r"```.*?```|^(?:\||#|:|\+\+\+).*?$", "", text, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", lines)


def glossary():
    block = re.search(r"```\{glossary\}\n(.*?)```", TEXTS["glossary"], re.S)[1]
    return [term for line in re.findall(r"^\S.*$", block, re.M) for term in line.split(", ")]


def words_of(term):
    """A pattern of the term, its plural, and `rank` but not `rank-` or `ranked`."""
    stem = re.escape(term).replace(r"\ ", r"\s+") + "(?:e?s)?"
    stem = {"axis": "ax[ie]s", "residual": r"residuals?(?! connection)"}.get(term, stem)
    return rf"(?<![\w-]){stem}(?![\w-])"


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


UNITS = "[KMGT]i?B|ms|s|seconds?|minutes?|hours?|days?|weeks?|FLOPs|tokens/s|[MGT]bit/s"

# Numbers that describe no measurement: a supposed size, and the setting of a link.
GIVEN = {"dataset": {"1 TB"}, "schedules": {"100 Mbit/s"}}


@pytest.mark.parametrize("page", TEXTS)
def test_a_number_with_a_unit_is_a_fact(page):
    """In problems it may be chosen freely. Tables are not read."""
    text = re.sub(r"^(:{3,})\{problem\}.*?^\1$", "", TEXTS[page], flags=re.S | re.M)
    text = prose(re.sub(r"\{fact\}`[^`]+`", "", text))
    found = re.findall(rf"\d[\d,.]* (?:(?:million|billion) )?(?:%|(?:{UNITS})\b)", text)
    assert set(found) == GIVEN.get(page, set())


def test_tests_that_a_page_names_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert named
    assert not {name for name in named if f"def {name}(" not in tests}
