"""The fuzzer: cases are drawn again by their seeds, and failing ones are recorded."""

import json

import pytest

import fuzz


def test_a_seed_always_draws_the_same_valid_case_and_settings_vary(monkeypatch):
    cases = [fuzz.draw(seed) for seed in range(40)]
    assert cases == [json.loads(json.dumps(fuzz.draw(seed))) for seed in range(40)]
    assert all(fuzz.is_valid(case) for case in cases)
    for name in cases[0]:
        assert len({str(case[name]) for case in cases}) > 1, name
    assert not fuzz.is_valid(cases[0] | {"seq_len": 7, "shape": [1, 1, 1, 2]})
    monkeypatch.setattr(fuzz.model, "declare", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # no refusal of a setting
        fuzz.is_valid(cases[0])


def test_the_command_records_each_seed_and_prints_how_to_repeat_it(tmp_path, capsys, monkeypatch):
    """With a check in place of those that compile."""

    def check(case):
        return 1 / (case["gather"] == "layer")

    monkeypatch.setattr(fuzz, "CHECKS", {"step": check})
    out = tmp_path / "fuzz.jsonl"
    command = ["--cases", "6", "--out", str(out)]
    assert fuzz.main(command) == 1
    printed = capsys.readouterr().out
    assert "step: Traceback" in printed and "equal" in printed
    case = printed.partition("--case '")[2].partition("'")[0]
    assert fuzz.main(["--case", case]) == 1
    assert fuzz.main(["--case", json.dumps(json.loads(case) | {"gather": "layer"})]) == 0
    assert fuzz.main(command) == 1  # no seed runs again
    assert len(out.read_text().splitlines()) == 6
