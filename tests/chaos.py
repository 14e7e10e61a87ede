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
    from runtime import errors, phases

    this = Interruption(*interruption or ("none", 0, 0.0, 0))
    begun = Counter()
    phase = phases.Phases.phase

    def interrupt() -> None:
        print(f"interrupted: {time.monotonic()}", flush=True)
        os.kill(os.getpid(), this.number)

    def counted(self: phases.Phases, name: str) -> None:
        phase(self, name)
        kind = name.split()[0]
        begun[kind] += 1
        if kind == this.kind and begun[kind] == this.after + 1:
            timer = threading.Timer(this.delay_s, interrupt)
            timer.daemon = True
            timer.start()

    phases.Phases.phase = counted
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
        if name not in ("name", "tokens_per_s"):
            found[f"picture of {name}"] = repr(getattr(shown, "tolist", lambda v=shown: v)())
    return found


class Chaos:
    def __init__(self, flags: Flags, folder: Path):
        self.folder, self.random = folder, random.Random(flags.seed)
        self.wrong: list[str] = []
        self.rows: Counter[tuple[str, str]] = Counter()
        self.compared = 0
        from data import prepare

        source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
        with contextlib.redirect_stdout(None):
            prepare.main([*source, "--out", str(folder / "data")])

    def start(
        self, name: str, processes: int, victim: int = 0, interruption: Interruption | None = None
    ) -> Ended:
        """Start a run, or resume it. The victim interrupts itself."""
        arguments = [*MODEL.split(), "--run.peer_seconds", str(PEER_S), "--run.name", name]
        arguments += ["--run.dir", str(self.folder)]
        for split in ("train", "val"):
            arguments += [f"--data.{split}", str(self.folder / "data" / split)]
        started, logs = [], [self.folder / f"{name}.{n}.log" for n in range(processes)]
        for number, environment in enumerate(environments(processes, 8 // processes)):
            text = json.dumps(interruption if number == victim else None)
            with logs[number].open("w") as log:
                started.append(start((__file__, "--child", text, *arguments), environment, log))
        stops = interruption and interruption.number == signal.SIGSTOP
        try:
            for number, process in enumerate(started):
                if not (stops and number == victim):
                    process.wait(LIMIT_S)
            at = time.monotonic()
        finally:
            for process in started:
                process.kill()  # what is stopped, or did not end
        return Ended([p.wait() for p in started], [log.read_text() for log in logs], at)

    def interrupt(self, what: str, processes: int, interruptions: int, number: int) -> None:
        """Interrupt runs so many times in all, and let each of them come to its end."""
        left, kinds = interruptions, list(KINDS)
        self.random.shuffle(kinds)
        if left:
            ended = self.start(f"whole-{processes}", processes)
            if any(ended.codes):
                raise SystemExit(f"an undisturbed run ended with {ended.codes}:\n{ended.output[0]}")
        while left:
            name = f"{what}-{left}"
            if kinds[0] == "restore":  # a new run restores nothing
                kinds.append(kinds.pop(0))
            while True:
                delay_s, most = KINDS[kinds[0]]
                delay_s, after = self.random.uniform(0, delay_s), self.random.randint(0, most)
                interruption = Interruption(kinds[0], after, delay_s, number) if left else None
                victim = self.random.randrange(processes)
                ended = self.start(name, processes, victim, interruption)
                if ended.interrupted(victim) is not None:
                    left -= 1
                    self.rows[what, kinds[0]] += 1
                    done = f"{what}: {interruptions - left} of {interruptions}"
                    print(f"{done}, {kinds[0]} + {delay_s:.2f} s")
                    kinds.append(kinds.pop(0))  # one that this start had no more of is next again
                if ended.finished:  # before the interruption, or in spite of it
                    break
                if not interruption or ended.codes[victim] != -signal.SIGKILL:
                    self.wrong.append(f"{name} ended with {ended.codes}\n{ended.output}")
                    return
                self._check_survivors(name, victim, ended)
            found, expected = (reported(self.folder / n) for n in (name, f"whole-{processes}"))
            differ = [k for k in expected.keys() | found.keys() if found.get(k) != expected.get(k)]
            self.compared += 1
            if differ:
                self.wrong.append(f"{name}: {', '.join(differ)} differ")
            shutil.rmtree(self.folder / name)

    def _check_survivors(self, name: str, victim: int, ended: Ended) -> None:
        seconds = ended.at - (ended.interrupted(victim) or ended.at)
        for number, (code, text) in enumerate(zip(ended.codes, ended.output, strict=True)):
            in_time = code in (75, -signal.SIGABRT) and seconds <= PEER_S + 5
            if number != victim and not in_time:
                how = f"process {number} ended with {code} after {seconds:.1f} s"
                self.wrong.append(f"{name}: {how}:\n{text}")


def main(flags: Flags) -> int:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = flags.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(flags, folder)
        chaos.interrupt("killed", 1, flags.kills, signal.SIGKILL)
        chaos.interrupt("killed, of two", 2, flags.pairs, signal.SIGKILL)
        chaos.interrupt("stopped, of two", 2, flags.stops, signal.SIGSTOP)
    for (what, kind), count in sorted(chaos.rows.items()):
        print(f"{what:16}{kind:12}{count:4}")
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
