"""What readers of the guide run: commands of its pages, coding problems, and its figures."""

import re
import shlex
import subprocess
import sys
from functools import cache

import pytest

from conftest import ROOT
from runtime import cli
from test_guide import PROBLEMS, check, pages
from test_guide_text import TEXTS

SOLUTIONS = {  # «a part of it | a mistake»
    "tensor_parallel_mlp": "return «jax.lax.psum(jax.nn.relu(x @ up) @ down, 'tensor')|x»",
    "schedule_tasks": "return «2 * pipeline - 2 - rank|pipeline - 1 + rank» + microbatch",
    "feistel_inverse": "return «right ^ hashed(left), left|right, left ^ hashed(right)»",
    "lost_share": "return save_s / interval_s + interval_s / «(2 * failure_s)|failure_s»",
    "owner": "return max(i for i, b in enumerate(begins) if b «<=|<» first_byte or not i)",
    "rotary": """half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / «half|len(x)»)
    a, b = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])""",
    "assign": """count, slots = [0] * experts, [[] for _ in choices]
    for token in «range(len(choices))|reversed(range(len(choices)))»:
        for e in choices[token]:
            slots[token].append(e * capacity + count[e] if count[e] < capacity else -1)
            count[e] += 1
    return slots""",
    "newton_schulz": """x = x / np.linalg.norm(x)
    for _ in range(«5|4»):
        A = x @ x.T
        x = FACTORS[0] * x + (FACTORS[1] * A + FACTORS[2] * A @ A) @ x
    return x""",
}


@pytest.mark.parametrize("name", [p.code for p in PROBLEMS.values() if p.code])
def test_a_coding_problem_takes_a_solution_and_refuses_a_mistake(name, tmp_path):
    stub = (ROOT / "guide/problems" / f"{name}.py").read_text()
    assert stub.count("raise NotImplementedError") == 1 == SOLUTIONS[name].count("|")
    for code, part in enumerate((r"\1", r"\2")):
        lines = re.sub("«(.*)[|](.*)»", part, SOLUTIONS[name])
        file = tmp_path / f"answer{code}.py"
        file.write_text(stub.replace("raise NotImplementedError", lines))
        assert check.run_code(name, file) == code


@cache
def help_of(*program):
    done = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_guide_have_help_and_their_output_may_be_cut():
    for name in ("guide/build.py", "guide/check.py"):
        assert name in help_of(sys.executable, name)
    line = f"'{sys.executable}' '{ROOT / 'guide/check.py'}' --list | true"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert ended.stderr == "" and len(commands()) > 20


def commands():
    found = {}
    for page, text in TEXTS.items():
        text = text.replace("\\\n", "")  # a command on several lines
        lines = re.findall(r"^\./.*$", text, re.M) + re.findall(r"`(\./[^`]*)`", text)
        found |= {f"{page}: {line[:70]}": line for line in lines}
    return found


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


def test_every_figure_is_drawn_with_a_title():
    import figures  # late: test_guide puts the guide on the path

    for name in pages.used("figure"):
        text = figures.draw(name)
        assert text.startswith("<svg") and "<title>" in text and text.endswith("</svg>"), name
