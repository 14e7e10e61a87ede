"""The guide: quoted code, facts, problems. guide/build.py --check inspects the pages."""

import inspect
import json
import re
import sys
import textwrap

import pytest

import dataset
from conftest import ROOT

sys.path.append(str(ROOT / "guide"))
import answers
import check
import facts
import pages

PROBLEMS = pages.problems()


def test_definitions_can_be_quoted(tmp_path, monkeypatch):
    lines, line = inspect.getsourcelines(dataset.Mixture.identity.fget)  # with its decorator
    text = textwrap.dedent("".join(lines)).rstrip()
    assert pages.excerpt("dataset.py", "Mixture.identity") == (line, text)
    assert re.fullmatch("PERIOD = .*", pages.excerpt("dataset.py", "PERIOD").text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("def long():\n" + "    x = 1\n" * pages.MAX_LINES)
    for file, name, message in (
        ("code.py", "two", "has no definition 'two'"),
        ("other.py", "one", "other.py does not exist"),
        ("code.py", "long", "long has 41 lines, and a quoted block 40 at most"),
    ):
        with pytest.raises(pages.PageError, match=message):
            pages.excerpt(file, name)


def test_the_minutes_of_a_page_count_its_words_and_its_quoted_code(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("def long():\n" + "    x = 1\n" * 29)
    (tmp_path / "page.md").write_text("word " * 437 + "```{code} code.py long\n```")
    assert pages.minutes("page") == 3  # 440 words, 30 lines


def test_the_number_of_a_chapter_is_that_of_its_title():
    assert [pages.number(page) for page in ("intro", "experts")] == [0, 10]
    for page in ("glossary", "missing"):
        with pytest.raises(pages.PageError, match=f"guide/{page}.md is not a chapter"):
            pages.number(page)


@pytest.mark.parametrize(
    ("number", "spellings", "wrong"),
    [
        ("3.1", ["96 x 1024", "96x1,024", "(96, 1024)", "96 \u00d7 1024"], "1024 x 96: another or"),
        ("3.1", ["96 * 1024"], "96: expected 2 numbers, and found 1"),
        ("3.1", [], "96 x 2048: number 2: this is twice the right value"),
        ("3.4", ["1376256", "1,376,256", "1_376_256 bytes", "1.3125 MiB"], "1: too small"),
        ("3.6", [], "1,572,865: close, and not exact"),
        ("4.3", ["fsdp, pipeline", "fsdp pipeline", "(fsdp, pipeline)"], "tensor: 2 names are exp"),
        ("4.3", [], "pipeline, fsdp: another order"),
        ("3.7", [], "8: half the right value"),
        ("5.1", ["7/31", "7 / 31", "22.6 %", "22.6%", "0.226"], "0.3: too large"),
        ("5.1", [], "22.6: a hundred times the right value"),
        ("5.3", ["3/11; 3/19; 3/19", "27.3 %; 15.8 %; 15.8 %"], "1/2; 3/19; 3/19: number 1"),
        ("5.4", ["1; 5", "(1, 5)"], "1: expected 2 numbers"),
    ],
)
def test_an_answer_is_taken_in_its_spellings_and_a_wrong_one_says_why(number, spellings, wrong):
    problem = PROBLEMS[number]
    given, _, why = wrong.partition(": ")
    answer, accept = answers.evaluate(problem.answer), float(problem.accept)
    assert [check.compare(answer, text, accept) for text in spellings] == [""] * len(spellings)
    assert why in check.compare(answer, given, accept)


def test_every_answer_evaluates_and_can_be_shown():
    shown = [check.describe(answers.evaluate(p.answer)) for p in PROBLEMS.values() if p.answer]
    assert len(shown) >= 14 and all(shown)
    with pytest.raises(pages.PageError, match=r"Schedule\(4, 1\) does not evaluate: TypeError"):
        answers.evaluate("Schedule(4, 1)")


def test_a_malformed_problem_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    for block, message in (
        (":::{problem} 1.1\nHow many?\n:::\n", "problem 1.1 needs one of :answer: and :code:"),
        (2 * ":::{problem} 1.1\n:answer: 1\nHow many?\n:::\n", "two problems 1.1"),
    ):
        (tmp_path / "page.md").write_text(block)
        with pytest.raises(pages.PageError, match=message):
            pages.problems()


def test_the_command_names_what_it_does_not_know(capsys):
    for words, message in (
        (["9.9", "1"], "there is no problem 9.9"),
        (["5.6", "missing.py"], "missing.py is not a file"),
        (["5.1", "three"], "Write it as 3/11"),
    ):
        assert check.main(words) == 2
        assert message in capsys.readouterr().out


def test_facts_are_shown_known_not_stale_and_have_a_kind_and_a_source(tmp_path, monkeypatch):
    used, stored = pages.used("fact"), facts.stored()
    assert facts.check(used) == stored
    with pytest.raises(pages.PageError, match=r"page.md shows 'speed', which is no fact"):
        facts.check(used | {"speed": ["page.md"]})
    with pytest.raises(pages.PageError, match="no page shows the fact 'tiny-time'"):
        facts.check({name: where for name, where in used.items() if name != "tiny-time"})
    monkeypatch.setattr(facts, "STORE", tmp_path / "facts.json")
    for name, change, message in (
        ("bubble-4-1-8", {"text": "20 %"}, "bubble-4-1-8 is stale: '20 %' is now '27 %'"),
        ("tiny-time", {"kind": "guessed"}, "is of kind 'guessed'"),
        ("tiny-time", {"quote": "no such text"}, "has no longer 'no such text'"),
        ("tiny-time", {"text": "203 s"}, "203 does not stand in"),
    ):
        facts.STORE.write_text(json.dumps(stored | {name: stored[name] | change}))
        with pytest.raises(pages.PageError, match=message):
            facts.check(used)
    facts.refresh()  # computes formulas, and keeps what is recorded
    assert facts.stored() == stored | {"tiny-time": stored["tiny-time"] | {"text": "203 s"}}
