"""Kills training runs at random instants, starts them again, and compares what they end with, bit
for bit, with runs that were never stopped.

    ./run.sh python tests/chaos.py --kills 200 --pairs 30
    ./run.sh python tests/chaos.py --kills 0 --pairs 0 --stops 0 --terms 10 --pair_terms 2

A run of one process with 8 devices is killed --kills times, one of two processes with 4 devices
each --pairs times; of two one is killed, and the other has to end by itself, in time and with a
code that restarts.
With --stops it is stopped (SIGSTOP) and not killed. With --terms and --pair_terms it is asked to
end (SIGTERM): all processes have to, with 143 and without losing a step, and it is measured how
long they take. Blows fall into every kind of work in turn, at a random one of its times, after a
random delay. With --bucket the runs live in an emulated bucket, of whose requests some fail in each
life, and are compared with one on a disk. Prints a table; exit code 1 if anything differs.
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
    from bucket import Bucket

sys.path.insert(0, str(ROOT))

MODEL = """
--model.width 32 --model.blocks 4 --model.dense_layers 0 --model.heads 2
--model.kv_lora_rank 16 --model.hidden 32 --model.expert_hidden 16 --model.qk_nope_head_dim 8
--model.qk_rope_head_dim 8 --model.experts 4 --model.v_head_dim 8 --model.compute_dtype float32
--train.sequence_length 32
--train.microbatches 2 --optimizer.warmup_steps 2 --eval.sequences 16 --train.loss_chunk_tokens 64
--train.steps 16 --eval.every_steps 4 --checkpoint.every_steps 3 --checkpoint.keep 2
--sample.every_steps 5 --sample.tokens 4 --sample.prompts def
"""
PEER_S = 10
# Each kind of work, with the longest delay after its beginning at which a kill falls, and how many
# of it a process may do first.
KINDS = {
    "step": (0.3, 6),
    "save": (0.8, 2),  # writing goes on behind the steps after it
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
    # the runs that are struck live in an emulated bucket, of whose requests some fail in each life
    bucket: bool = False
    seed: int = 0  # of the instants
    folder: Path | None = None  # for runs and logs; a temporary one if not given


@dataclass(frozen=True)
class Blow:
    """When a process strikes itself."""

    kind: str
    after: int  # so many of the kind are done first
    delay_s: float
    number: int = signal.SIGKILL


# --- in the process that is struck ----------------------------------------------------------------


def child(blow: Blow | None, arguments: list[str]) -> None:
    """A run that strikes itself, and says when, and how long its longest save took."""
    import checkpoint
    import faults
    import main
    import watchdog

    close = checkpoint.Checkpoints.close

    def closed(self: checkpoint.Checkpoints) -> None:
        close(self)
        print(f"longest save: {self.longest_s}", flush=True)

    checkpoint.Checkpoints.close = closed
    if blow:

        def strike() -> None:
            print(f"struck: {time.monotonic()}", flush=True)
            os.kill(os.getpid(), blow.number)

        begun = Counter()
        phase = watchdog.Watchdog.phase

        def counted(self: watchdog.Watchdog, name: str, *limit: float) -> None:
            phase(self, name, *limit)
            kind = name.split()[0]
            begun[kind] += 1
            if kind == blow.kind and begun[kind] == blow.after + 1:
                timer = threading.Timer(blow.delay_s, strike)
                timer.daemon = True
                timer.start()

        watchdog.Watchdog.phase = counted
    faults.command_line(lambda: main.run(main.parse(arguments)))


# --- outside --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How the processes of one life ended, and what they said."""

    codes: list[int]
    said: list[str]
    at: float  # time.monotonic() when the last of them did

    def told(self, what: str, number: int) -> float | None:
        """The number that the process says of this; machine code may talk on the same line."""
        found = re.search(rf"{what}: ([\d.]+)", self.said[number])
        return float(found[1]) if found else None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end; SIGTERM may have come after that."""
        late = "files: " in self.said[0] and set(self.codes) <= {0, -signal.SIGTERM}
        return late or not any(self.codes)


class Job:
    """One run, in as many lives as it takes."""

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
        self.lives = 0

    def files(self) -> Path:
        """Where its records and pictures can be read now."""
        return self.run

    def remove(self) -> None:
        shutil.rmtree(self.run)

    def live(self, blows: dict[int, Blow]) -> Ended:
        """One life, in which these processes are struck."""
        self.lives += 1
        started = []
        places = environments(self.processes, 8 // self.processes, **self.environment)
        for number, environment in enumerate(places):
            blow = blows.get(number)
            text = json.dumps(dataclasses.asdict(blow)) if blow else "null"
            log = (self.folder / f"{self.name}.{self.lives}.{number}.log").open("w+")
            command = __file__, "--child", text, *self.arguments
            started.append((start(command, environment, log), log))
        return self._ended(started, blows)

    def _ended(self, started: list, blows: dict[int, Blow]) -> Ended:
        until = time.monotonic() + LIMIT_S
        stopped = {n for n, blow in blows.items() if blow.number == signal.SIGSTOP}
        try:
            for number, (process, _) in enumerate(started):
                if number not in stopped:
                    process.wait(max(1, until - time.monotonic()))
            at = time.monotonic()
        finally:
            for process, _ in started:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # what is stopped, or did not end
        codes, said = [], []
        for process, log in started:
            codes.append(process.wait())
            log.seek(0)
            said.append(log.read())
            log.close()
        return Ended(codes, said, at)


class BucketJob(Job):
    """One that lives in a bucket, of whose requests some fail once or twice in each life."""

    KINDS = (429, 503, "cut request", "cut response", "delay")

    def __init__(self, bucket: "Bucket", chance: random.Random, *how: Any):
        super().__init__(*how)
        self.bucket, self.chance, self.environment = bucket, chance, bucket.environment
        self.url = f"{bucket.url}/runs/{self.name}"
        self.checkpoints = f"{self.url}/checkpoints"
        self.arguments += ["--run.dir", f"{bucket.url}/runs"]

    def files(self) -> Path:
        import buckets

        shutil.rmtree(self.run, ignore_errors=True)
        objects = buckets.Prefix(self.url)
        for name in objects.found():
            if name.partition("/")[0] not in ("checkpoints", "lock"):
                file = self.run / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(objects.read(name))
        return self.run

    def remove(self) -> None:
        import buckets

        objects = buckets.Prefix(self.url)
        objects.remove(objects.found())
        super().remove()

    def live(self, blows: dict[int, Blow]) -> Ended:
        for kind in self.KINDS:
            after, times = self.chance.randrange(200), self.chance.randint(1, 2)
            self.bucket.fault(kind, after=after, times=times, seconds=2.0)
        ended = super().live(blows)
        self.bucket.mend()
        return ended


def told(run: Path, checkpoints: str | Path) -> dict[str, object]:
    """All that a run ends with, but what was measured: bytes of arrays, records, samples, and what
    the pictures show.
    """
    import checkpoint
    import metrics
    import plot

    records = [
        {name: value for name, value in record.items() if name not in metrics.MEASURED}
        for record in metrics.read(run / "metrics.jsonl")
    ]
    found = {"metrics.jsonl": records, "samples.jsonl": (run / "samples.jsonl").read_bytes()}
    with contextlib.closing(checkpoint.Checkpoints(checkpoints)) as saved:
        step = saved.latest()
        found["step"] = step
        arrays = saved.arrays(step)
        found |= {name: a.read().result().tobytes() for name, a in arrays.items()}
    found["pictures"] = sorted(p.name for p in (run / "plots").iterdir())
    shown = vars(plot.Recorded(run)) | {"name": ""}
    found |= {
        f"picture of {k}": repr(getattr(v, "tolist", lambda v=v: v)()) for k, v in shown.items()
    }
    return found


def differences(job: Job, expected: dict[str, object]) -> list[str]:
    found = told(job.files(), job.checkpoints)
    return [k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)]


class Chaos:
    def __init__(self, flags: Flags, folder: Path, bucket: "Bucket | None"):
        self.bucket = bucket
        self.folder, self.random = folder, random.Random(flags.seed)
        self.data = folder / "data"
        self.expected: dict[int, dict[str, object]] = {}  # by the number of processes
        self.wrong: list[str] = []
        self.rows: Counter[tuple[str, str]] = Counter()
        # Seconds from SIGTERM until all had ended, and those of a step and a save of the same life.
        self.took: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.compared = 0
        from data import prepare

        source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
        with contextlib.redirect_stdout(None):
            prepare.main([*source, "--out", str(self.data)])

    def run_whole(self, processes: int) -> None:
        """Keeps what a run that is never stopped ends with."""
        job = Job(self.folder, f"whole-{processes}", self.data, processes)
        ended = job.live({})
        if any(ended.codes):
            raise SystemExit(f"a run without blows ended with {ended.codes}:\n{ended.said[0]}")
        self.expected[processes] = told(job.files(), job.checkpoints)

    def strike(self, what: str, processes: int, blows: int, number: int) -> None:
        """Strikes runs so many times in all, and lets each of them come to its end."""
        if not blows:
            return
        if processes not in self.expected:
            self.run_whole(processes)
        left, kinds = blows, list(KINDS)
        self.random.shuffle(kinds)
        while left:
            how = self.folder, f"{what}-{left}", self.data, processes
            job = BucketJob(self.bucket, self.random, *how) if self.bucket else Job(*how)
            while True:
                blow = self._blow(kinds, number) if left else None
                victim = self.random.randrange(processes)
                ended = job.live({victim: blow} if blow else {})
                if ended.told("struck", victim) is not None:
                    left -= 1
                    kinds.append(kinds.pop(0))  # one that this life had no more of is next again
                    self.rows[what, blow.kind] += 1
                    print(f"{what}: {blows - left} of {blows}, {blow.kind} + {blow.delay_s:.2f} s")
                if ended.finished:  # before the blow, or in spite of it
                    break
                asked = number == signal.SIGTERM
                if asked:
                    right = set(ended.codes) == {128 + signal.SIGTERM}
                else:
                    right = ended.codes[victim] == -signal.SIGKILL
                if not (blow and right):
                    self._say(job, f"ended with {ended.codes}\n{ended.said}")
                    return
                (self._asked if asked else self._survivors)(what, job, victim, ended)
            differ = differences(job, self.expected[processes])
            self.compared += 1
            if differ:
                self.wrong.append(f"{job.name}: after {job.lives} lives {', '.join(differ)} differ")
            job.remove()

    def _blow(self, kinds: list[str], number: int) -> Blow:
        kind = kinds[0]
        delay_s, most = KINDS[kind]
        return Blow(kind, self.random.randint(0, most), self.random.uniform(0, delay_s), number)

    def _say(self, job: Job, wrong: str) -> None:
        self.wrong.append(f"{job.name}, life {job.lives}: {wrong}")

    def _survivors(self, what: str, job: Job, victim: int, ended: Ended) -> None:
        for number, (code, text) in enumerate(zip(ended.codes, ended.said, strict=True)):
            if number != victim and code not in (75, -signal.SIGABRT):
                self._say(job, f"process {number} ended with {code}:\n{text}")
            seconds = ended.at - ended.told("struck", victim)
            if number != victim and seconds > PEER_S + 5:
                self._say(job, f"process {number} ended after {seconds:.1f} s:\n{text}")

    def _asked(self, what: str, job: Job, victim: int, ended: Ended) -> None:
        """Every step that was recorded is saved, unless there was nothing to save yet."""
        import metrics

        text = ended.said[victim]
        file = job.files() / "metrics.jsonl"  # none where it had not begun a step
        records = metrics.read(file) if file.exists() else []
        last = records[-1]["step"] if records else 0
        name = f"the newest checkpoint is {f'of step {last}' if last else 'none'}. "
        if name not in text:
            self._say(job, f"process {victim} did not say {name!r}:\n{text}")
            return
        if not last:
            return
        step_s = statistics.median(r["step_s"] for r in records if "step_s" in r)
        seconds = ended.at - ended.told("struck", victim)
        self.took[what].append((seconds, step_s + ended.told("longest save", 0)))

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
    """A bucket for as long as the block runs, which this process knows too."""
    from bucket import Server

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
        chaos.strike("killed", 1, flags.kills, signal.SIGKILL)
        chaos.strike("killed, of two", 2, flags.pairs, signal.SIGKILL)
        chaos.strike("stopped, of two", 2, flags.stops, signal.SIGSTOP)
        chaos.strike("asked to end", 1, flags.terms, signal.SIGTERM)
        chaos.strike("asked to end, of two", 2, flags.pair_terms, signal.SIGTERM)
    print(chaos.table())
    print(*chaos.wrong, sep="\n")
    what = f"{len(chaos.wrong)} faults" if chaos.wrong else "all equal, bit for bit"
    print(f"{chaos.compared} runs compared in {time.monotonic() - started:.0f} s: {what}")
    return bool(chaos.wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fields = json.loads(sys.argv[2])
        del sys.argv[1:3]  # what is left is the same in all processes, as pre-flight checks want
        child(fields and Blow(**fields), sys.argv[1:])
    else:
        import tyro

        raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
