"""The fuzzer: cases are drawn again by their seeds, and failing ones are made smaller."""

import json

import pytest

import fuzz


def test_a_seed_always_draws_the_same_valid_case():
    cases = [fuzz.draw(seed) for seed in range(40)]
    assert cases == [fuzz.draw(seed) for seed in range(40)]
    assert all(fuzz.is_valid(case) for case in cases)
    assert all(json.loads(json.dumps(case)) == case for case in cases)
    for name in fuzz.SIMPLE:  # each setting is varied
        assert len({str(case[name]) for case in cases}) > 1, name


def test_a_case_is_rejected_only_for_its_settings(monkeypatch):
    assert not fuzz.is_valid(fuzz.draw(0) | {"seq_len": 7, "shape": [1, 1, 1, 2]})
    monkeypatch.setattr(fuzz.model, "declare", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuzz.is_valid(fuzz.draw(0))


@pytest.fixture
def broken(monkeypatch):
    """A check that fails where two settings meet, as a stand-in for those that compile."""

    def check(case):
        if case["q_lora_rank"] and case["gather"] == "layer":
            raise fuzz.Difference("loss differs")

    monkeypatch.setattr(fuzz, "CHECKS", {"step": check})


def test_a_failing_case_keeps_only_what_makes_it_fail(broken, capsys):
    seed = next(s for s in range(99) if fuzz.failure_of(fuzz.draw(s)))
    case, failure = fuzz.shrunk(fuzz.draw(seed), "step: loss differs")
    assert failure == "step: loss differs"
    kept = {name for name, simple in fuzz.SIMPLE.items() if case[name] != simple}
    assert {"q_lora_rank", "gather"} <= kept
    for name in kept - {"q_lora_rank", "gather"}:  # others only if the simplest is not accepted
        assert not fuzz.is_valid(case | {name: fuzz.SIMPLE[name]})


def test_an_error_of_the_program_is_a_failure(monkeypatch):
    monkeypatch.setattr(fuzz, "CHECKS", {"decode": lambda case: 1 / 0})
    assert fuzz.failure_of(fuzz.draw(0)).startswith("decode: Traceback")


def test_the_command_records_each_seed_and_prints_how_to_repeat_it(broken, tmp_path, capsys):
    out = tmp_path / "fuzz.jsonl"
    command = ["--cases", "12", "--out", str(out)]
    assert fuzz.main(command) == 1
    printed = capsys.readouterr().out
    case = json.loads(printed.partition("--case '")[2].partition("'")[0])
    assert fuzz.main(["--case", json.dumps(case)]) == 1
    assert len(out.read_text().splitlines()) == 12
    assert fuzz.main(command) == 1  # no seed runs again
    assert len(out.read_text().splitlines()) == 12
