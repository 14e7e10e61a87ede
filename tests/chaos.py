"""Kill training runs at random times, start them again, and compare the results bit for bit with
those of runs that were not interrupted.

    ./run.sh python tests/chaos.py --kills 200 --pairs 30

Runs of one process with 8 devices are killed --kills times. Of runs of two processes with 4 devices
each, one process is killed --pairs times; the other must end in time, with a code to retry. --stops
suspends a process (SIGSTOP) instead.

The interruptions fall into every kind of work in turn, after a random delay. Prints a table. Exit
code 1 if anything differs.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from processes import LIMIT_S, ROOT, environments, start

sys.path.insert(0, str(ROOT))

from runtime import jsonl

MODEL = """
--model.hidden_size 32 --model.num_hidden_layers 4 --model.decoder_sparse_step 1
--model.num_attention_heads 2 --model.kv_lora_rank 16 --model.qk_nope_head_dim 8
--model.qk_rope_head_dim 8 --model.v_head_dim 8 --model.intermediate_size 32
--model.moe_intermediate_size 16 --model.n_routed_experts 4 --model.compute_dtype float32
--train.seq_len 32 --train.microbatches 2 --train.loss_chunk_tokens 64 --eval.sequences 16
--optimizer.warmup_steps 2 --train.steps 16 --eval.every_steps 4 --checkpoint.every_steps 3
--checkpoint.keep 2 --sample.every_steps 5 --sample.tokens 4 --sample.prompts def
"""
PEER_S = 10
# Kinds of work, with the longest delay of a kill after the work begins, and the most work of this
# kind before it.
KINDS = {
    "step": (0.3, 6),
    "save": (0.8, 2),  # writing continues during the next steps
    "evaluation": (0.3, 1),
    "samples": (0.3, 1),
    "restore": (1.0, 0),
    "compile": (1.0, 0),
    "batch": (0.05, 4),
    "pictures": (0.5, 0),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    kills: int = 20  # of one process with 8 devices
    pairs: int = 3  # of one of two processes with 4 devices each
    stops: int = 1  # of one of two, by SIGSTOP
    seed: int = 0  # of the instants
    folder: Path | None = None  # for runs and logs; a temporary one if not given


class Interruption(NamedTuple):
    """When a process interrupts itself."""

    kind: str
    after: int  # so many of the kind are done first
    delay_s: float
    number: int


# --- in the process that is interrupted -----------------------------------------------------------


def child(interruption: list, arguments: list[str]) -> None:
    """Train, interrupt this process, and print when."""
    import main
    from runtime import errors, watchdog

    this = Interruption(*interruption or ("none", 0, 0.0, 0))
    begun = Counter()
    phase = watchdog.Watchdog.phase

    def interrupt() -> None:
        print(f"interrupted: {time.monotonic()}", flush=True)
        os.kill(os.getpid(), this.number)

    def counted(self: watchdog.Watchdog, name: str) -> None:
        phase(self, name)
        kind = name.split()[0]
        begun[kind] += 1
        if kind == this.kind and begun[kind] == this.after + 1:
            timer = threading.Timer(this.delay_s, interrupt)
            timer.daemon = True
            timer.start()

    watchdog.Watchdog.phase = counted
    errors.run_command(lambda: main.run(main.parse(arguments)))


# --- outside --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """Exit codes and output of the processes of one start."""

    codes: list[int]
    output: list[str]
    at: float  # time.monotonic() when the last of them did

    def interrupted(self, number: int) -> float | None:
        """Return when a process was; other output may be on the same line."""
        found = re.search(r"interrupted: ([\d.]+)", self.output[number])
        return float(found[1]) if found else None

    @property
    def finished(self) -> bool:
        """Whether the run completed; another process than the first may be killed after that."""
        first, *others = self.codes
        done = "files: " in self.output[0] and first == 0 and {*others} <= {0, -signal.SIGKILL}
        return done or not any(self.codes)


class Job:
    """One run, started until it completes."""

    def __init__(self, folder: Path, name: str, data: Path, processes: int):
        self.folder, self.name, self.processes = folder, name, processes
        self.run = folder / name
        self.arguments = [
            *MODEL.split(),
            *("--run.peer_seconds", str(PEER_S), "--run.dir", str(folder), "--run.name", name),
        ]
        for split in ("train", "val"):
            self.arguments += [f"--data.{split}", str(data / split)]
        self.attempts = 0

    def attempt(self, interruptions: dict[int, Interruption]) -> Ended:
        """Start the run; these processes interrupt themselves."""
        self.attempts += 1
        started = []
        places = environments(self.processes, 8 // self.processes)
        for number, environment in enumerate(places):
            text = json.dumps(interruptions.get(number))
            log = self.folder / f"{self.name}.{self.attempts}.{number}.log"
            command = __file__, "--child", text, *self.arguments
            with log.open("w") as file:
                started.append((start(command, environment, file), log))
        stopped = {n for n, i in interruptions.items() if i.number == signal.SIGSTOP}
        try:
            for number, (process, _) in enumerate(started):
                if number not in stopped:
                    process.wait(LIMIT_S)
            at = time.monotonic()
        finally:
            for process, _ in started:
                process.kill()  # what is stopped, or did not end
        codes = [process.wait() for process, _ in started]
        return Ended(codes, [log.read_text() for _, log in started], at)


def reported(run: Path) -> dict[str, object]:
    """All that a run ends with, but what was measured: bytes of arrays, records, samples, and what
    the pictures show.
    """
    import checkpoint
    import metrics
    import plot

    found = {"samples.jsonl": (run / "samples.jsonl").read_bytes()}
    found["metrics.jsonl"] = [
        {name: value for name, value in record.items() if name not in metrics.MEASURED}
        for record in jsonl.read(run / "metrics.jsonl")
    ]
    with contextlib.closing(checkpoint.Checkpoints(run / "checkpoints")) as saved:
        found["step"] = step = saved.steps()[-1]
        found |= {name: a.whole().tobytes() for name, a in saved.arrays(step).items()}
    found["pictures"] = sorted(p.name for p in (run / "plots").iterdir())
    for name, shown in vars(plot.RunRecords(run)).items():
        if name != "name":
            found[f"picture of {name}"] = repr(getattr(shown, "tolist", lambda v=shown: v)())
    return found


class Chaos:
    def __init__(self, flags: Flags, folder: Path):
        self.folder, self.random = folder, random.Random(flags.seed)
        self.data = folder / "data"
        self.expected: dict[int, dict[str, object]] = {}  # by the number of processes
        self.wrong: list[str] = []
        self.rows: Counter[tuple[str, str]] = Counter()
        self.compared = 0
        from data import prepare

        source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
        with contextlib.redirect_stdout(None):
            prepare.main([*source, "--out", str(self.data)])

    def interrupt(self, what: str, processes: int, interruptions: int, number: int) -> None:
        """Interrupt runs so many times in all, and let each of them come to its end."""
        if interruptions and processes not in self.expected:
            whole = Job(self.folder, f"whole-{processes}", self.data, processes)
            ended = whole.attempt({})
            if any(ended.codes):
                raise SystemExit(f"an undisturbed run ended with {ended.codes}:\n{ended.output[0]}")
            self.expected[processes] = reported(whole.run)
        left, kinds = interruptions, list(KINDS)
        self.random.shuffle(kinds)
        while left:
            job = Job(self.folder, f"{what}-{left}", self.data, processes)
            if kinds[0] == "restore":  # a new run restores nothing
                kinds.append(kinds.pop(0))
            while True:
                interruption = self._interruption(kinds[0], number) if left else None
                victim = self.random.randrange(processes)
                ended = job.attempt({victim: interruption} if interruption else {})
                if ended.interrupted(victim) is not None:
                    left -= 1
                    kinds.append(kinds.pop(0))  # one that this attempt had no more of is next again
                    self.rows[what, interruption.kind] += 1
                    done = f"{what}: {interruptions - left} of {interruptions}"
                    print(f"{done}, {interruption.kind} + {interruption.delay_s:.2f} s")
                if ended.finished:  # before the interruption, or in spite of it
                    break
                if not interruption or ended.codes[victim] != -signal.SIGKILL:
                    self._log(job, f"ended with {ended.codes}\n{ended.output}")
                    return
                self._survivors(job, victim, ended)
            expected, found = self.expected[processes], reported(job.run)
            differ = [k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)]
            self.compared += 1
            if differ:
                self._log(job, f"{', '.join(differ)} differ")
            shutil.rmtree(job.run)

    def _interruption(self, kind: str, number: int) -> Interruption:
        delay_s, most = KINDS[kind]
        after = self.random.randint(0, most)
        return Interruption(kind, after, self.random.uniform(0, delay_s), number)

    def _log(self, job: Job, wrong: str) -> None:
        self.wrong.append(f"{job.name}, attempt {job.attempts}: {wrong}")

    def _survivors(self, job: Job, victim: int, ended: Ended) -> None:
        seconds = ended.at - ended.interrupted(victim)
        for number, (code, text) in enumerate(zip(ended.codes, ended.output, strict=True)):
            in_time = code in (75, -signal.SIGABRT) and seconds <= PEER_S + 5
            if number != victim and not in_time:
                self._log(job, f"process {number} ended with {code} after {seconds:.1f} s:\n{text}")

    def table(self) -> str:
        columns = list(dict.fromkeys(what for what, _ in self.rows))
        lines = [f"| kind of work | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for kind in KINDS:
            cells = [str(self.rows[what, kind]) for what in columns]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        return "\n".join(lines)


def main(flags: Flags) -> int:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = flags.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(flags, folder)
        chaos.interrupt("killed", 1, flags.kills, signal.SIGKILL)
        chaos.interrupt("killed, of two", 2, flags.pairs, signal.SIGKILL)
        chaos.interrupt("stopped, of two", 2, flags.stops, signal.SIGSTOP)
    print(chaos.table())
    print(*chaos.wrong, sep="\n")
    what = f"{len(chaos.wrong)} faults" if chaos.wrong else "all equal, bit for bit"
    print(f"{chaos.compared} runs compared in {time.monotonic() - started:.0f} s: {what}")
    return bool(chaos.wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        interruption = json.loads(sys.argv[2])
        del sys.argv[1:3]  # what is left is the same in all processes, as pre-flight checks want
        child(interruption, sys.argv[1:])
    else:
        import tyro

        raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
