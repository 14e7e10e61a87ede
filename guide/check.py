"""Check your answer of a problem of the guide.

    ./run.sh python guide/check.py 3.2 "96 x 1024"
    ./run.sh python guide/check.py 5.6 my_answer.py      a coding problem: your file is tested
    ./run.sh python guide/check.py --list

Numbers may be written as 3/11, 27.3 %, 1,572,864, 1.5e6 or 1.5 MiB, and shapes as 96 x 1024 or
(96, 1024).
Exit code: 0 for a right answer, 1 for a wrong one, 2 for one that cannot be read.
"""

import importlib.util
import os
import re
import signal
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pages

UNITS = {
    "%": Fraction(1, 100), "percent": Fraction(1, 100), "ms": Fraction(1, 1000),
    "k": 10**3, "m": 10**6, "million": 10**6, "billion": 10**9,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
    **dict.fromkeys(("", "b", "byte", "bytes", "s", "ticks", "devices", "times", "days"), 1),
    **dict.fromkeys(("tokens", "slots", "rows", "numbers", "steps"), 1),
}  # fmt: skip


class Unreadable(Exception):
    """An answer that cannot be read: why, and how to write it."""


def number(text: str) -> Fraction:
    """Parse 3/11, 27.3 %, 1,572,864, 1.5 MiB. Raises Unreadable."""
    value, unit = re.fullmatch(r"(.*?)([a-z%]*)", text.strip().lower()).groups()
    try:
        return Fraction(re.sub(r"[_,' ]", "", value)) * UNITS[unit]
    except (ValueError, ZeroDivisionError, KeyError):
        message = f"{text!r} is not a number. Write it as 3/11, 27.3 % or 1,572,864."
        raise Unreadable(message) from None


def numbers(text: str) -> list[Fraction]:
    """Parse several numbers: 96 x 1024, (96, 1024), 3/11; 3/19."""
    inner = text.strip().strip("()[]")
    if re.search(r"[x\u00d7*;]", inner):
        parts = re.split(r"\s*[x\u00d7*;]\s*", inner)
    else:
        # A comma before three digits separates thousands, if no space follows it.
        parts = re.split(r",\s+|,(?!\d{3}\b)", inner)
    return [number(part) for part in parts if part.strip()]


def describe(answer: Any) -> str:
    """Return an answer as the guide shows it."""
    match answer:
        case bool():
            return "yes" if answer else "no"
        case int():
            return f"{answer:,}"
        case Fraction():
            return f"{answer} = {float(answer):.1%}" if answer < 1 else f"{answer}"
        case float():
            return f"{answer:,.4g}"
        case tuple() if all(isinstance(x, int) for x in answer):
            return " x ".join(describe(x) for x in answer)
        case tuple() | list():
            is_words = all(isinstance(x, str) for x in answer)
            return (", " if is_words else "; ").join(describe(x) for x in answer)
    return str(answer)


def compare(answer: Any, given: str, accept: float) -> str:
    """Return what is wrong with a given answer, or an empty string. Raises Unreadable."""
    match answer:
        case bool():
            said = given.strip(" .").lower()
            if said not in ("yes", "no", "true", "false"):
                raise Unreadable("write yes or no.")
            return "" if (said in ("yes", "true")) == answer else "it is the other way around"
        case int() | float() | Fraction():
            found = numbers(given)
            if len(found) != 1:
                raise Unreadable(f"expected one number, and found {len(found)} in {given!r}.")
            return _difference(answer, found[0], accept)
        case tuple() | list() if all(isinstance(x, str) for x in answer):
            said = re.findall(r"[\w.]+", given)
            if sorted(said) == sorted(answer):
                return "" if said == list(answer) else "these are the right ones, in another order"
            right = len({*said} & {*answer})
            return f"{len(answer)} names are expected, and {right} of yours are among them"
    found = numbers(given)
    if len(found) != len(answer):
        return f"expected {len(answer)} numbers, and found {len(found)}"
    for i, (true, own) in enumerate(zip(answer, found, strict=True), start=1):
        if wrong := _difference(true, own, accept):
            if sorted(found) == sorted(Fraction(x) for x in answer):
                return "these are the right numbers, in another order"
            return f"number {i}: {wrong}"
    return ""


FACTORS = {
    2: "twice the right value",
    Fraction(1, 2): "half the right value",
    4: "four times the right value",
    8: "eight times the right value: bits or bytes?",
    Fraction(1, 8): "an eighth of the right value",
    100: "a hundred times the right value: write 3 % or 0.03",
    Fraction(1, 100): "a hundredth of the right value",
}  # fmt: skip


def _difference(true: Any, own: Fraction, accept: float) -> str:
    exact = Fraction(true)
    # A fraction may be given rounded; an integer is exact.
    bound = 0 if isinstance(true, int) else Fraction(accept) * abs(exact)
    if abs(own - exact) <= bound:
        return ""
    for factor, words_of in FACTORS.items():
        if exact and abs(own / exact - factor) <= factor * Fraction(accept) / 2:
            return f"this is {words_of}"
    if exact and abs(own / exact - 1) < Fraction(1, 20):
        return "close, and not exact"
    return f"{float(own):g} is too {'small' if own < exact else 'large'}"


def run_code(name: str, file: Path) -> int:
    """Test a reader's file with the hidden test of a coding problem."""
    from problems import hidden_tests  # late: it imports jax

    spec = importlib.util.spec_from_file_location("answer", file)
    answer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    test = getattr(hidden_tests, name)
    wrong = next(test(answer), None)
    print(f"not right: {wrong}." if wrong else f"right: {test.__doc__}")
    return int(bool(wrong))


def main(arguments: list[str]) -> int:
    problems = pages.problems()
    if arguments[:1] == ["--list"]:
        in_order = sorted(problems.values(), key=lambda p: [*map(int, p.number.split("."))])
        print("\n".join(f"{p.number:6}{p.page}.md" for p in in_order))
        return 0
    if len(arguments) < 2 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    problem, given = problems.get(arguments[0]), " ".join(arguments[1:])
    if not problem:
        print(f"error: there is no problem {arguments[0]}. guide/check.py --list names all.")
        return 2
    if problem.code:
        if not Path(given).is_file():
            stub = f"guide/problems/{problem.code}.py"
            print(f"error: {given} is not a file. Copy {stub} and fill it.")
            return 2
        return run_code(problem.code, Path(given))
    import answers  # late: it imports jax

    try:
        wrong = compare(answers.evaluate(problem.answer), given, float(problem.accept))
    except Unreadable as error:
        print(f"error: {error}")
        return 2
    print(f"not right: {wrong}." if wrong else "right.")
    return int(bool(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` ends without a message
    # Before jax is imported: a problem has a mesh of four devices.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main(sys.argv[1:]))
