"""The fuzzer notices a case that fails. CI runs real ones."""

import json

import fuzz


def test_the_command_records_each_seed_and_prints_how_to_repeat_it(tmp_path, capsys, monkeypatch):
    def check(case):  # instead of those that compile
        assert fuzz.is_valid(case) and case["gather"] == "layer"

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
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [*range(6)]
