"""Kill training runs at random times, start them again, and compare the results bit for bit with
those of runs that were not interrupted.

    ./run.sh python tests/chaos.py --kills 200 --pairs 30
    ./run.sh python tests/chaos.py --kills 0 --pairs 0 --stops 0 --terms 10 --pair_terms 2

Runs of one process with 8 devices are killed --kills times. Of runs of two processes with 4 devices
each, one process is killed --pairs times; the other must end in time, with a code to retry. --stops
suspends a process (SIGSTOP) instead. --terms and --pair_terms send SIGTERM: all processes must end
with 143 and lose no step, and the time that they take is measured.

The interruptions fall into every kind of work in turn, after a random delay. With --bucket the runs
are in an emulated bucket in which some requests fail, and are compared with a run on a disk. Prints
a table. Exit code 1 if anything differs.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import LIMIT_S, ROOT, environments, start

if TYPE_CHECKING:  # children need no emulator
    from fake_bucket import Bucket

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
    terms: int = 0  # of one process, by SIGTERM
    pair_terms: int = 0  # of one of two, by SIGTERM
    # the interrupted runs are in an emulated bucket; some requests fail in each attempt
    bucket: bool = False
    seed: int = 0  # of the instants
    folder: Path | None = None  # for runs and logs; a temporary one if not given


@dataclass(frozen=True)
class Interruption:
    """When a process interrupts itself."""

    kind: str
    after: int  # so many of the kind are done first
    delay_s: float
    number: int = signal.SIGKILL


# --- in the process that is interrupted -----------------------------------------------------------


def child(interruption: Interruption | None, arguments: list[str]) -> None:
    """Train, interrupt this process, and print the time of it and of the longest save."""
    import checkpoint
    import main
    from runtime import errors, watchdog

    close = checkpoint.Checkpoints.close

    def closed(self: checkpoint.Checkpoints) -> None:
        close(self)
        print(f"longest save: {self.longest_s}", flush=True)

    checkpoint.Checkpoints.close = closed
    if interruption:

        def interrupt() -> None:
            print(f"interrupted: {time.monotonic()}", flush=True)
            os.kill(os.getpid(), interruption.number)

        begun = Counter()
        phase = watchdog.Watchdog.phase

        def counted(self: watchdog.Watchdog, name: str) -> None:
            phase(self, name)
            kind = name.split()[0]
            begun[kind] += 1
            if kind == interruption.kind and begun[kind] == interruption.after + 1:
                timer = threading.Timer(interruption.delay_s, interrupt)
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

    def reported(self, what: str, number: int) -> float | None:
        """Return the number that a process printed; other output may be on the same line."""
        found = re.search(rf"{what}: ([\d.]+)", self.output[number])
        return float(found[1]) if found else None

    @property
    def finished(self) -> bool:
        """Whether the run completed; a signal may have interrupted a process after that."""
        first, *others = self.codes
        late = {0, -signal.SIGTERM}
        done = "files: " in self.output[0] and first in late
        done = done and {*others} <= late | {-signal.SIGKILL}
        return done or not any(self.codes)


class Job:
    """One run, started until it completes."""

    def __init__(self, folder: Path, name: str, data: Path, processes: int):
        self.folder, self.name, self.processes = folder, name, processes
        self.run = folder / name
        self.checkpoints: str | Path = self.run / "checkpoints"
        self.environment: dict[str, str] = {}
        self.arguments = [
            *MODEL.split(),
            "--run.peer_seconds",
            str(PEER_S),
            "--run.dir",
            str(folder),
            "--run.name",
            name,
        ]
        for split in ("train", "val"):
            self.arguments += [f"--data.{split}", str(data / split)]
        self.attempts = 0

    def files(self) -> Path:
        """Where its records and pictures can be read now."""
        return self.run

    def remove(self) -> None:
        shutil.rmtree(self.run)

    def attempt(self, interruptions: dict[int, Interruption]) -> Ended:
        """Start the run; these processes interrupt themselves."""
        self.attempts += 1
        started = []
        places = environments(self.processes, 8 // self.processes, **self.environment)
        for number, environment in enumerate(places):
            interruption = interruptions.get(number)
            text = json.dumps(dataclasses.asdict(interruption)) if interruption else "null"
            log = (self.folder / f"{self.name}.{self.attempts}.{number}.log").open("w+")
            command = __file__, "--child", text, *self.arguments
            started.append((start(command, environment, log), log))
        return self._ended(started, interruptions)

    def _ended(self, started: list, interruptions: dict[int, Interruption]) -> Ended:
        until = time.monotonic() + LIMIT_S
        stopped = {n for n, i in interruptions.items() if i.number == signal.SIGSTOP}
        try:
            for number, (process, _) in enumerate(started):
                if number not in stopped:
                    process.wait(max(1, until - time.monotonic()))
            at = time.monotonic()
        finally:
            for process, _ in started:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # what is stopped, or did not end
        codes, output = [], []
        for process, log in started:
            codes.append(process.wait())
            log.seek(0)
            output.append(log.read())
            log.close()
        return Ended(codes, output, at)


class BucketJob(Job):
    """A run in a bucket. Some requests fail once or twice in each attempt."""

    KINDS = (429, 503, "cut request", "cut response", "delay")

    def __init__(self, bucket: "Bucket", chance: random.Random, *how: Any):
        super().__init__(*how)
        self.bucket, self.chance, self.environment = bucket, chance, bucket.environment
        self.url = f"{bucket.url}/runs/{self.name}"
        self.checkpoints = f"{self.url}/checkpoints"
        self.arguments += ["--run.dir", f"{bucket.url}/runs"]

    def files(self) -> Path:
        from runtime import buckets, run_directory

        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(run_directory.BucketRunDirectory(self.url).files, self.run)
        (self.run / "plots").mkdir()
        objects = buckets.Prefix(self.url)
        for name in objects.list_objects("plots/"):
            (self.run / name).write_bytes(objects.read(name))
        return self.run

    def remove(self) -> None:
        from runtime import buckets

        objects = buckets.Prefix(self.url)
        objects.remove(objects.list_objects())
        super().remove()

    def attempt(self, interruptions: dict[int, Interruption]) -> Ended:
        for kind in self.KINDS:
            after, times = self.chance.randrange(200), self.chance.randint(1, 2)
            self.bucket.fault(kind, after=after, times=times, seconds=2.0)
        ended = super().attempt(interruptions)
        self.bucket.clear_faults()
        return ended


def reported(run: Path, checkpoints: str | Path) -> dict[str, object]:
    """All that a run ends with, but what was measured: bytes of arrays, records, samples, and what
    the pictures show.
    """
    import checkpoint
    import metrics
    import plot

    records = [
        {name: value for name, value in record.items() if name not in metrics.MEASURED}
        for record in jsonl.read(run / "metrics.jsonl")
    ]
    found = {"metrics.jsonl": records, "samples.jsonl": (run / "samples.jsonl").read_bytes()}
    with contextlib.closing(checkpoint.Checkpoints(checkpoints)) as saved:
        step = saved.steps()[-1]
        found["step"] = step
        arrays = saved.arrays(step)
        found |= {name: a.whole().tobytes() for name, a in arrays.items()}
    found["pictures"] = sorted(p.name for p in (run / "plots").iterdir())
    shown = vars(plot.RunRecords(run)) | {"name": ""}
    found |= {
        f"picture of {k}": repr(getattr(v, "tolist", lambda v=v: v)()) for k, v in shown.items()
    }
    return found


def differences(job: Job, expected: dict[str, object]) -> list[str]:
    found = reported(job.files(), job.checkpoints)
    return [k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)]


class Chaos:
    def __init__(self, flags: Flags, folder: Path, bucket: "Bucket | None"):
        self.bucket = bucket
        self.folder, self.random = folder, random.Random(flags.seed)
        self.data = folder / "data"
        self.expected: dict[int, dict[str, object]] = {}  # by the number of processes
        self.wrong: list[str] = []
        self.rows: Counter[tuple[str, str]] = Counter()
        # Seconds from SIGTERM until all had ended; those of a step and a save of the same attempt.
        self.took: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.compared = 0
        from data import prepare

        source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
        with contextlib.redirect_stdout(None):
            prepare.main([*source, "--out", str(self.data)])

    def run_whole(self, processes: int) -> None:
        """Keeps what a run that is never stopped ends with."""
        job = Job(self.folder, f"whole-{processes}", self.data, processes)
        ended = job.attempt({})
        if any(ended.codes):
            raise SystemExit(f"an undisturbed run ended with {ended.codes}:\n{ended.output[0]}")
        self.expected[processes] = reported(job.files(), job.checkpoints)

    def interrupt(self, what: str, processes: int, interruptions: int, number: int) -> None:
        """Interrupts runs so many times in all, and lets each of them come to its end."""
        if not interruptions:
            return
        if processes not in self.expected:
            self.run_whole(processes)
        left, kinds = interruptions, list(KINDS)
        self.random.shuffle(kinds)
        while left:
            how = self.folder, f"{what}-{left}", self.data, processes
            job = BucketJob(self.bucket, self.random, *how) if self.bucket else Job(*how)
            if kinds[0] == "restore":  # a new run restores nothing
                kinds.append(kinds.pop(0))
            while True:
                interruption = self._interruption(kinds, number) if left else None
                victim = self.random.randrange(processes)
                ended = job.attempt({victim: interruption} if interruption else {})
                if ended.reported("interrupted", victim) is not None:
                    left -= 1
                    kinds.append(kinds.pop(0))  # one that this attempt had no more of is next again
                    self.rows[what, interruption.kind] += 1
                    done = f"{what}: {interruptions - left} of {interruptions}"
                    print(f"{done}, {interruption.kind} + {interruption.delay_s:.2f} s")
                if ended.finished:  # before the interruption, or in spite of it
                    break
                requested = number == signal.SIGTERM
                if requested:
                    right = set(ended.codes) == {128 + signal.SIGTERM}
                else:
                    right = ended.codes[victim] == -signal.SIGKILL
                if not (interruption and right):
                    self._log(job, f"ended with {ended.codes}\n{ended.output}")
                    return
                (self._requested if requested else self._survivors)(what, job, victim, ended)
            differ = differences(job, self.expected[processes])
            self.compared += 1
            if differ:
                names = ", ".join(differ)
                self.wrong.append(f"{job.name}: after {job.attempts} attempts {names} differ")
            job.remove()

    def _interruption(self, kinds: list[str], number: int) -> Interruption:
        kind = kinds[0]
        delay_s, most = KINDS[kind]
        return Interruption(
            kind, self.random.randint(0, most), self.random.uniform(0, delay_s), number
        )

    def _log(self, job: Job, wrong: str) -> None:
        self.wrong.append(f"{job.name}, attempt {job.attempts}: {wrong}")

    def _survivors(self, what: str, job: Job, victim: int, ended: Ended) -> None:
        for number, (code, text) in enumerate(zip(ended.codes, ended.output, strict=True)):
            if number != victim and code not in (75, -signal.SIGABRT):
                self._log(job, f"process {number} ended with {code}:\n{text}")
            seconds = ended.at - ended.reported("interrupted", victim)
            if number != victim and seconds > PEER_S + 5:
                self._log(job, f"process {number} ended after {seconds:.1f} s:\n{text}")

    def _requested(self, what: str, job: Job, victim: int, ended: Ended) -> None:
        """Every step that was recorded is saved, unless there was nothing to save yet."""

        text = ended.output[victim]
        file = job.files() / "metrics.jsonl"  # none where it had not begun a step
        records = jsonl.read(file) if file.exists() else []
        last = records[-1]["step"] if records else 0
        name = f"The newest checkpoint is of step {last}. " if last else "No step is saved yet. "
        if name not in text:
            self._log(job, f"process {victim} did not say {name!r}:\n{text}")
            return
        if not last:
            return
        step_s = statistics.median(r["step_s"] for r in records if "step_s" in r)
        seconds = ended.at - ended.reported("interrupted", victim)
        self.took[what].append((seconds, step_s + ended.reported("longest save", 0)))

    def table(self) -> str:
        columns = list(dict.fromkeys(what for what, _ in self.rows))
        lines = [f"| kind of work | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for kind in KINDS:
            cells = [str(self.rows[what, kind]) for what in columns]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        names = "until all had ended", "of one step and the save"
        for i, name in enumerate(names if self.took else ()):
            both = {what: [pair[i] for pair in took] for what, took in self.took.items()}
            texts = {w: f"{statistics.median(s):.2f} ({max(s):.2f})" for w, s in both.items()}
            cells = [texts.get(what, "") for what in columns]
            lines.append(f"| s {name}, median (longest) | {' | '.join(cells)} |")
        return "\n".join(lines)


@contextlib.contextmanager
def emulated() -> Iterator["Bucket"]:
    """Provide a bucket during the block, also for this process."""
    from fake_bucket import Server

    with Server() as server:
        os.environ |= server.environment
        yield server.bucket()


def main(flags: Flags) -> int:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = flags.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        bucket = stack.enter_context(emulated()) if flags.bucket else None
        chaos = Chaos(flags, folder, bucket)
        chaos.interrupt("killed", 1, flags.kills, signal.SIGKILL)
        chaos.interrupt("killed, of two", 2, flags.pairs, signal.SIGKILL)
        chaos.interrupt("stopped, of two", 2, flags.stops, signal.SIGSTOP)
        chaos.interrupt("SIGTERM", 1, flags.terms, signal.SIGTERM)
        chaos.interrupt("SIGTERM, of two", 2, flags.pair_terms, signal.SIGTERM)
    print(chaos.table())
    print(*chaos.wrong, sep="\n")
    what = f"{len(chaos.wrong)} faults" if chaos.wrong else "all equal, bit for bit"
    print(f"{chaos.compared} runs compared in {time.monotonic() - started:.0f} s: {what}")
    return bool(chaos.wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fields = json.loads(sys.argv[2])
        del sys.argv[1:3]  # what is left is the same in all processes, as pre-flight checks want
        child(fields and Interruption(**fields), sys.argv[1:])
    else:
        import tyro

        raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
