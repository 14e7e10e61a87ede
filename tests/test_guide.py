"""The guide: quoted code, facts, problems. guide/build.py --check inspects the pages."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "guide"))
import answers
import check
import facts
import figures
import pages

PROBLEMS = pages.problems()


def marks(text):
    """{name: lines} of each marked block; raises ValueError where marks do not pair up."""
    blocks, name, start = {}, None, 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        mark = re.fullmatch(r"\s*# guide: (\w+)", line)
        if not mark:
            continue
        if (mark[1] == "end") != (name is not None) or mark[1] in blocks:
            raise ValueError(f"line {number}: {line.strip()} does not pair up")
        if mark[1] == "end":
            blocks[name] = lines[start : number - 1]
            name = None
        else:
            name, start = mark[1], number
    if name is not None:
        raise ValueError(f"{name} has no end")
    return blocks


def test_every_mark_begins_ends_and_is_there_once():
    found = [name for path in sorted(ROOT.glob("*.py")) for name in marks(path.read_text())]
    assert len(found) == len(set(found))
    assert {"weights", "attention", "mlp", "moe", "loss", "step", "batch", "permute"} <= set(found)


@pytest.mark.parametrize(
    "text",
    ["# guide: a\n", "# guide: end\n", "# guide: a\n# guide: b\n# guide: end\n"],
)
def test_a_mark_without_its_partner_is_found(text):
    with pytest.raises(ValueError, match=r"does not pair up|has no end"):
        marks(text)


# --- quoted code ----------------------------------------------------------------------------------

SOURCE = """\
LIMIT = 3

# guide: part
def one():
    return 1
# guide: end


class Thing:
    size: int = 2

    @property
    def twice(self):
        return 2 * self.size
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text(SOURCE)
    return tmp_path / "code.py"


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("LIMIT", 1, "LIMIT = 3"),
        ("part", 4, "def one():\n    return 1"),
        ("one", 4, "def one():\n    return 1"),
        ("Thing.size", 10, "size: int = 2"),
        ("Thing.twice", 12, "@property\ndef twice(self):\n    return 2 * self.size"),
    ],
)
def test_a_mark_a_definition_and_a_method_can_be_quoted(name, line, text, source):
    assert pages.excerpt("code.py", name) == pages.Excerpt("code.py", line, text)


def test_a_changed_function_changes_the_quotation(source):
    source.write_text(SOURCE.replace("return 1", "return 7"))
    assert pages.excerpt("code.py", "one").text == "def one():\n    return 7"


def test_what_is_missing_or_too_long_is_refused(source):
    with pytest.raises(pages.PageError, match="and no definition 'two'"):
        pages.excerpt("code.py", "two")
    with pytest.raises(pages.PageError, match=r"other.py does not exist"):
        pages.excerpt("other.py", "one")
    source.write_text("def long():\n" + "    x = 1\n" * pages.MAX_LINES)
    with pytest.raises(pages.PageError, match="long has 41 lines, and a quoted block 40 at most"):
        pages.excerpt("code.py", "long")


# --- problems -------------------------------------------------------------------------------------


def wrong(number, given):
    problem = PROBLEMS[number]
    return check.compare(answers.evaluate(problem), given, float(problem.accept))


@pytest.mark.parametrize(
    ("number", "spellings"),
    [
        ("3.1", ["96 x 1024", "96x1,024", "(96, 1024)", "96 * 1024", "96 \u00d7 1024"]),
        ("3.3", ["1376256", "1,376,256", "1_376_256 bytes", "1.3125 MiB"]),
        ("3.6", ["fsdp, pipeline", "fsdp pipeline", "(fsdp, pipeline)"]),
        ("3.9", ["25,088 x 96"]),
        ("A.1", ["7/31", "7 / 31", "22.6 %", "22.6%", "0.226"]),
        ("A.3", ["3/11; 3/19; 3/19", "3/11, 3/19, 3/19", "27.3 %; 15.8 %; 15.8 %"]),
        ("A.4", ["1; 5", "(1, 5)"]),
    ],
)
def test_a_right_answer_is_taken_in_its_obvious_spellings(number, spellings):
    assert [wrong(number, given) for given in spellings] == [""] * len(spellings)


@pytest.mark.parametrize(
    ("number", "given", "said"),
    [
        ("3.1", "1024 x 96", "another order"),
        ("3.1", "96", "expected 2 numbers, and found 1"),
        ("3.1", "96 x 2048", "number 2: this is twice the right value"),
        ("3.7", "1,572,865", "close, and not exact"),
        ("3.8", "8", "half the right value"),
        ("3.6", "tensor", "2 names are expected, and 0 of yours"),
        ("3.6", "pipeline, fsdp", "another order"),
        ("A.1", "0.3", "too large"),
        ("A.1", "22.6", "a hundred times the right value"),
    ],
)
def test_a_wrong_answer_says_what_is_wrong(number, given, said):
    assert said in wrong(number, given)


def test_the_joins_of_a_word_end_in_the_tokens_of_the_tokenizer():
    for word in (" return", " function", " tokenization", "def"):
        ids = answers.tokenizer.encode_ordinary(word)
        tokens = [answers.tokenizer.decode([i]) for i in ids]
        assert list(answers.merges(word)[-1]) == tokens


def test_an_answer_that_cannot_be_read_says_how_to_write_it():
    with pytest.raises(check.Unreadable, match="Write it as 3/11"):
        wrong("A.1", "three")


def test_every_answer_evaluates_and_can_be_shown():
    shown = [check.describe(answers.evaluate(p)) for p in PROBLEMS.values() if p.answer]
    assert len(shown) >= 14 and all(shown)
    problem = dataclasses.replace(PROBLEMS["A.1"], answer="bubble(4, 1)")
    with pytest.raises(pages.PageError, match=r"problem A.1 in schedules.md does not evaluate"):
        answers.evaluate(problem)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (":::{problem} 1.1\nHow many?\n:::\n", "problem 1.1 needs one of :answer: and :code:"),
        (2 * ":::{problem} 1.1\n:answer: 1\nHow many?\n:::\n", "two problems 1.1"),
    ],
)
def test_a_malformed_problem_is_refused(block, message, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    (tmp_path / "page.md").write_text(block)
    with pytest.raises(pages.PageError, match=message):
        pages.problems()


SOLUTIONS = {
    "tensor_parallel_mlp": "return jax.lax.psum(jax.nn.relu(x @ up) @ down, 'tensor')",
    "schedule_tasks": "return 2 * pipeline - 2 - rank + microbatch",
    "feistel_inverse": "return right ^ hashed(left), left",
    "lost_share": "return save_s / interval_s + interval_s / (2 * failure_s)",
    "owner": "return max(i for i, begin in enumerate(begins) if begin <= first_byte)",
    "rotary": """half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])""",
    "assign": """count, slots = [0] * experts, []
    for chosen in choices:
        slots.append([])
        for e in chosen:
            slots[-1].append(e * capacity + count[e] if count[e] < capacity else -1)
            count[e] += 1
    return slots""",
    "newton_schulz": """x = x / np.linalg.norm(x)
    for _ in range(5):
        A = x @ x.T
        x = FACTORS[0] * x + (FACTORS[1] * A + FACTORS[2] * A @ A) @ x
    return x""",
}
MISTAKES = {
    "tensor_parallel_mlp": "return jax.nn.relu(x @ up) @ down",
    "schedule_tasks": "return pipeline - 1 + rank + microbatch",
    "feistel_inverse": "return right, left ^ hashed(right)",
    "lost_share": "return save_s / interval_s + interval_s / failure_s",
    "owner": "return max(i for i, begin in enumerate(begins) if i == 0 or begin < first_byte)",
    "rotary": """angle = position * theta ** (-np.arange(len(x) // 2) / len(x))
    a, b = np.split(x, 2)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])""",
    "assign": """order = sorted(range(len(choices)), key=lambda t: -t)
    count, slots = [0] * experts, [[] for _ in choices]
    for token in order:
        for e in choices[token]:
            slots[token].append(e * capacity + count[e] if count[e] < capacity else -1)
            count[e] += 1
    return slots""",
    "newton_schulz": """x = x / np.linalg.norm(x)
    for _ in range(4):
        A = x @ x.T
        x = FACTORS[0] * x + (FACTORS[1] * A + FACTORS[2] * A @ A) @ x
    return x""",
}


@pytest.mark.parametrize("name", [p.code for p in PROBLEMS.values() if p.code])
def test_a_coding_problem_takes_a_solution_and_refuses_a_mistake(name, tmp_path):
    stub = (ROOT / "guide/problems" / f"{name}.py").read_text()
    assert stub.count("raise NotImplementedError") == 1
    for number, (lines, code) in enumerate([(SOLUTIONS, 0), (MISTAKES, 1)]):
        file = tmp_path / f"answer{number}.py"
        file.write_text(stub.replace("raise NotImplementedError", lines[name]))
        assert check.run_code(name, file) == code


def test_the_command_names_what_it_does_not_know(capsys):
    assert check.main(["9.9", "1"]) == 2
    assert "there is no problem 9.9" in capsys.readouterr().out
    assert check.main(["A.6", "missing.py"]) == 2
    assert "missing.py is not a file" in capsys.readouterr().out


# --- facts ----------------------------------------------------------------------------------------


def test_all_facts_are_shown_known_and_not_stale():
    assert facts.check(pages.facts_used()).keys() == {fact.name for fact in facts.FACTS}


def test_a_stale_fact_and_an_unknown_one_are_refused(tmp_path, monkeypatch):
    used, stored = pages.facts_used(), facts.stored()
    stored["bubble-4-1-8"]["text"] = "20 %"
    (tmp_path / "facts.json").write_text(json.dumps(stored))
    monkeypatch.setattr(facts, "STORE", tmp_path / "facts.json")
    with pytest.raises(pages.PageError, match="bubble-4-1-8 is stale: '20 %' is now '27 %'"):
        facts.check(used)
    with pytest.raises(pages.PageError, match="shows a fact 'speed'"):
        facts.check(used | {"speed": ["page.md"]})


def test_a_fact_needs_a_kind_and_a_source():
    with pytest.raises(pages.PageError, match="is of kind 'guessed'"):
        facts.compute(facts.Fact("a", "guessed", "1", "", lambda: 1))
    with pytest.raises(pages.PageError, match="either a function or a quote"):
        facts.compute(facts.Fact("a", "measured", "1", ""))
    gone = facts.Fact("a", "measured", "1", "", document="README.md", quote="no such text at all")
    with pytest.raises(pages.PageError, match=r"has no longer 'no such text at all'"):
        facts.compute(gone)


# --- figures --------------------------------------------------------------------------------------


def test_every_figure_is_drawn_with_a_title():
    for name, draw in figures.FIGURES.items():
        text = draw()
        assert text.startswith("<svg") and "<title>" in text and text.endswith("</svg>"), name


def test_the_commands_have_help():
    for name in ("build", "check"):
        command = [sys.executable, str(ROOT / "guide" / f"{name}.py"), "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and f"guide/{name}.py" in done.stdout


def test_the_list_of_problems_ends_without_a_message_if_its_reader_does():
    line = f"'{sys.executable}' '{ROOT / 'guide/check.py'}' --list | true"
    for _ in range(3):  # a reader may be in time
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert ended.stderr == ""
