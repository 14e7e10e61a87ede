"""A sweep of which runs fail, stopped in the middle and started again."""

import signal
import subprocess
import sys
import time

from processes import LIMIT_S, ROOT, environments
from runtime import jsonl
from tiny_run import FLAGS


def test_a_sweep_that_was_stopped_resumes_skips_finished_runs_and_names_failed_ones(data, tmp_path):
    runs, [environment] = tmp_path / "runs", environments(1, 8)
    flags = [*FLAGS, *data, "--run.dir", runs, "--run.name", "a", "--train.steps", "60"]
    flags += ["--grid.sample.prompts", "x", "--grid.data.val", data[3], "missing"]
    command = [sys.executable, str(ROOT / "sweep.py"), *map(str, flags)]
    options = {"env": environment, "cwd": tmp_path, "text": True, "stderr": subprocess.STDOUT}
    good = f"a-prompts-x-val-{data[3].replace('/', '_')}"
    first = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    try:
        limit = time.monotonic() + LIMIT_S
        while not (runs / good / "checkpoints" / "3").is_dir():
            assert first.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        printed = first.communicate(timeout=LIMIT_S)[0]
    finally:
        first.kill()
    assert first.returncode == 143 and "Start the same command again to resume." in printed
    before = jsonl.read(runs / good / "starts.jsonl")
    assert not (runs / "a-sweep" / "report.html").exists()
    for finished in (0, 1):
        again = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, **options)
        assert again.returncode == 2, again.stdout
        assert f"2 runs, of which {finished} are finished" in again.stdout
        assert "a-prompts-x-val-missing ended with exit code 2: error: " in again.stdout
        assert "error: 1 of 2 runs failed: a-prompts-x-val-missing. Fix" in again.stdout
        starts = jsonl.read(runs / good / "starts.jsonl")
        assert starts[:-1] == before and starts[-1]["step"] >= 3, "resumed once"
    assert (runs / "a-sweep" / "report.html").read_text(encoding="utf-8").count("<img") == 6
    assert {path.name for path in (runs / "a-sweep").glob("*.png")} >= {"learning_rate.png"}
