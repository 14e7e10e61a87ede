"""Kills training runs at random instants, starts them again, and compares what they end with, bit
for bit, with runs that were never stopped.

    ./run.sh python tests/chaos.py --kills 200 --pairs 30

A run of one process with 8 devices is killed --kills times, one of two processes with 4 devices
each --pairs times; of two one is killed, and the other has to end by itself, saying which it lost.
With --stops it is stopped (SIGSTOP) and not killed. Kills fall into every kind of work in turn,
at a random one of its times, after a random delay. Prints a table; exit code 1 if anything differs.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MODEL = """
--model.width 32 --model.blocks 4 --model.dense_layers 0 --model.heads 2
--model.kv_lora_rank 16 --model.hidden 32 --model.expert_hidden 16 --model.qk_nope_head_dim 8
--model.qk_rope_head_dim 8 --model.experts 4 --model.v_head_dim 8 --model.compute_dtype float32
--train.sequence_length 32
--train.microbatches 2 --optimizer.warmup_steps 2 --eval.sequences 16 --train.loss_chunk_tokens 64
--train.steps 16 --eval.every_steps 4 --checkpoint.every_steps 3 --checkpoint.keep 2
--sample.every_steps 5 --sample.tokens 4 --sample.prompts def --run.peer_seconds 10
"""
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
LIMIT_S = 600  # of one life


@dataclass(frozen=True, kw_only=True)
class Flags:
    kills: int = 20  # of one process with 8 devices
    pairs: int = 3  # of one of two processes with 4 devices each
    stops: int = 1  # of one of two, by SIGSTOP
    seed: int = 0
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
    """A run that strikes itself."""
    import faults
    import main
    import watch

    if blow:
        begun = Counter()
        doing = watch.Watch.doing

        def counted(self: watch.Watch, what: str) -> None:
            doing(self, what)
            kind = what.split()[0]
            begun[kind] += 1
            if kind == blow.kind and begun[kind] == blow.after + 1:
                timer = threading.Timer(blow.delay_s, os.kill, (os.getpid(), blow.number))
                timer.daemon = True
                timer.start()

        watch.Watch.doing = counted
    faults.command_line(lambda: main.run(main.parse(arguments)))


# --- outside --------------------------------------------------------------------------------------


class Job:
    """One run, in as many lives as it takes."""

    def __init__(self, folder: Path, name: str, data: Path, processes: int):
        self.folder, self.name, self.processes = folder, name, processes
        self.run = folder / name
        self.arguments = [*MODEL.split(), "--run.dir", str(folder), "--run.name", name]
        for split in ("train", "val"):
            self.arguments += [f"--data.{split}", str(data / split)]
        self.lives = 0

    def live(self, blows: dict[int, Blow]) -> tuple[list[int], list[str]]:
        """(exit codes, outputs) of the processes of one life, of which these are struck."""
        self.lives += 1
        environment = dict(os.environ)
        devices = 8 // self.processes
        flags = environment.get("XLA_FLAGS", "").split()
        flags = [f for f in flags if "host_platform_device_count" not in f]
        count = f"--xla_force_host_platform_device_count={devices}"
        environment |= {"XLA_FLAGS": " ".join([*flags, count]), "JAX_PLATFORMS": "cpu"}
        # Each life compiles the same, and what is small adds up.
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        if self.processes > 1:
            environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
            environment["JAX_NUM_PROCESSES"] = str(self.processes)
        started = []
        for number in range(self.processes):
            blow = blows.get(number)
            text = json.dumps(dataclasses.asdict(blow)) if blow else "null"
            log = (self.folder / f"{self.name}.{self.lives}.{number}.log").open("w+")
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", text, *self.arguments],
                env=environment | {"JAX_PROCESS_ID": str(number)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            started.append((process, log))
        return self._ended(started, blows)

    def _ended(self, started: list, blows: dict[int, Blow]) -> tuple[list[int], list[str]]:
        until = time.monotonic() + LIMIT_S
        stopped = {n for n, blow in blows.items() if blow.number == signal.SIGSTOP}
        try:
            for number, (process, _) in enumerate(started):
                if number not in stopped:
                    process.wait(max(1, until - time.monotonic()))
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
        return codes, said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def told(run: Path) -> dict[str, object]:
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
    with contextlib.closing(checkpoint.Checkpoints(run / "checkpoints")) as saved:
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


def differences(run: Path, expected: dict[str, object]) -> list[str]:
    found = told(run)
    return [k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)]


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

    def run_whole(self, processes: int) -> None:
        """Keeps what a run that is never stopped ends with."""
        job = Job(self.folder, f"whole-{processes}", self.data, processes)
        codes, said = job.live({})
        if any(codes):
            raise SystemExit(f"a run without kills ended with {codes}:\n{said[0]}")
        self.expected[processes] = told(job.run)

    def strike(self, what: str, processes: int, blows: int, number: int) -> None:
        """Strikes runs so many times in all, and lets each of them come to its end."""
        if not blows:
            return
        if processes not in self.expected:
            self.run_whole(processes)
        left = blows
        while left:
            job = Job(self.folder, f"{what}-{left}", self.data, processes)
            kinds = list(KINDS)
            self.random.shuffle(kinds)
            while True:
                blow = self._blow(kinds, number) if left else None
                victim = self.random.randrange(processes)
                codes, said = job.live({victim: blow} if blow else {})
                if not any(codes):  # it came to its end before the blow
                    break
                if codes[victim] != -signal.SIGKILL or not blow:
                    self.wrong.append(f"{job.name}, life {job.lives}: ended with {codes}\n{said}")
                    return
                left -= 1
                self.rows[what, blow.kind] += 1
                self._survivors(job, victim, codes, said)
                print(f"{what}: {blows - left} of {blows}, {blow.kind} + {blow.delay_s:.2f} s")
            differ = differences(job.run, self.expected[processes])
            self.compared += 1
            if differ:
                self.wrong.append(f"{job.name}: after {job.lives} lives {', '.join(differ)} differ")
            shutil.rmtree(job.run)

    def _blow(self, kinds: list[str], number: int) -> Blow:
        kind = kinds[0]
        kinds.append(kinds.pop(0))
        delay_s, most = KINDS[kind]
        return Blow(kind, self.random.randint(0, most), self.random.uniform(0, delay_s), number)

    def _survivors(self, job: Job, victim: int, codes: list[int], said: list[str]) -> None:
        for number, (code, text) in enumerate(zip(codes, said, strict=True)):
            name = f"process {victim} ({socket.gethostname()}) is lost"
            if number != victim and (code != 75 or name not in text):
                where = f"{job.name}, life {job.lives}: process {number}"
                self.wrong.append(f"{where} ended with {code}, without {name!r}:\n{text[-3000:]}")

    def table(self) -> str:
        columns = list(dict.fromkeys(what for what, _ in self.rows))
        lines = [f"| kind of work | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for kind in KINDS:
            cells = [str(self.rows[what, kind]) for what in columns]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        return "\n".join(lines)


def main(flags: Flags) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(flags, folder)
        chaos.strike("killed", 1, flags.kills, signal.SIGKILL)
        chaos.strike("killed, of two", 2, flags.pairs, signal.SIGKILL)
        chaos.strike("stopped, of two", 2, flags.stops, signal.SIGSTOP)
    print(chaos.table())
    print(*chaos.wrong, sep="\n")
    what = f"{len(chaos.wrong)} faults" if chaos.wrong else "all equal, bit for bit"
    print(f"{chaos.compared} runs compared in {time.monotonic() - started:.0f} s: {what}")
    return bool(chaos.wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fields = json.loads(sys.argv[2])
        child(fields and Blow(**fields), sys.argv[3:])
    else:
        import tyro

        raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
