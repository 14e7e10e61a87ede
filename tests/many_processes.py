"""Time a job of many processes on this machine that connect, compare and stop on one SIGTERM.

    ./run.sh python tests/many_processes.py --count 32

Each runs stand_in.py, which has the start and the end of main.py and no model. Prints the seconds;
exit code 1 if a process does not end with 143.
"""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import ROOT, environments

LIMIT_S = 600


def main(count: int) -> int:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, str(ROOT / "tests" / "stand_in.py"), "--steps", "100000"]
        logs, processes, started = [], [], time.monotonic()
        for number, environment in enumerate(environments(count, 1)):
            logs.append(folder / f"{number}.log")
            file = stack.enter_context(logs[-1].open("w"))
            processes.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=file)
            )
            stack.callback(processes[-1].kill)
        while not all(re.search(r"^step 2/", log.read_text(), re.M) for log in logs):
            if time.monotonic() - started > LIMIT_S or any(p.poll() is not None for p in processes):
                print(logs[0].read_text())
                return 1
            time.sleep(0.2)
        up_s = time.monotonic() - started
        processes[count // 2].send_signal(signal.SIGTERM)
        codes = [process.wait(LIMIT_S) for process in processes]
        all_s = time.monotonic() - started
    print(
        f"{count} processes connected, compared and took a step in {up_s:.1f} s, and stopped "
        f"{all_s - up_s:.1f} s after a SIGTERM to one of them; {all_s:.1f} s in all"
    )
    return set(codes) != {143}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=32)
    raise SystemExit(main(parser.parse_args().count))
