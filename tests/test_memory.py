"""What the programs of a run need, and runs that do not fit in memory."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import depth
import fit
import hardware
import loop
import main
import memory
import train
import utils
from devices import chips
from planning import advice, cost
from tiny_run import FLAGS, start

WIDE = "--mesh.fsdp 8 --mesh.pipeline 1 --mesh.tensor 1 --train.global_batch_size 32"


def test_peak_memory_is_that_of_the_device_or_else_of_the_compiler():
    names = "argument_size_in_bytes output_size_in_bytes alias_size_in_bytes temp_size_in_bytes"
    plan = SimpleNamespace(**dict(zip(names.split(), (100, 90, 80, 7), strict=True)))
    step = SimpleNamespace(memory_analysis=lambda: plan)
    for stats, expected in (
        ({"peak_bytes_in_use": 5}, (5, "at its fullest")),
        (None, (117, "planned by the compiler")),
    ):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats)
        assert memory.peak_bytes(SimpleNamespace(local_devices=[device]), step) == expected


@pytest.mark.parametrize(
    ("words", "share", "program", "fix"),
    [
        ("", 1e-3, memory.STEP, "By the plan no other setting fits"),  # parameters
        ("", 0.9, memory.STEP, "By the plan these fit: --"),  # activations
        (
            "--train.microbatches 1",
            0.95,
            memory.EVALUATION,
            "By the plan these fit: --train.microbatches 4 (",
        ),
        (
            f"--sample.tokens 31 --sample.prompts {'text ' * 200}",
            0.9,
            memory.SAMPLING,
            "Use a smaller --sample.tokens, or no samples",
        ),
    ],
)
def test_a_run_that_does_not_fit_ends_before_its_first_step(
    words, share, program, fix, data, tmp_path, monkeypatch
):
    found = {}

    def check(config, mesh, needed):
        assert needed.keys() == {memory.STEP, memory.EVALUATION, memory.SAMPLING}
        found["usable"] = share * needed[program]
        monkeypatch.setattr(memory, "usable_bytes", lambda mesh: found["usable"])
        check_memory(config, mesh, {program: needed[program]})

    check_memory = fit.check_memory
    monkeypatch.setattr(fit, "check_memory", check)
    with pytest.raises(fit.OutOfMemory) as error:
        start(data, tmp_path, "a", *WIDE.split(), *words.split())
    assert str(error.value).startswith(f"out of memory: {program} needs ")
    assert f"JAX may allocate {found['usable'] / utils.GIB:.3g} GiB on cpu. " in str(error.value)
    assert fix in str(error.value)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_an_error_of_a_device_names_settings_that_need_less_memory():
    config = utils.changed(main.parse(FLAGS), dict.fromkeys(utils.AUTO, 1))
    config = utils.changed(config, {"train.remat": "none", "fsdp.gather": "step"})
    mesh = train.make_mesh(config)
    cause = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."
    message = r"8 bytes\. By the plan these fit: --train\."
    with pytest.raises(fit.OutOfMemory, match=message), fit.explained(config, mesh):
        raise jax.errors.JaxRuntimeError(cause)
    with pytest.raises(ZeroDivisionError), fit.explained(config, mesh):
        raise ZeroDivisionError(cause[3:])


def test_a_run_calls_what_it_has_compiled_and_counts_its_state_with_it(data, tmp_path, monkeypatch):
    run, seen = loop.Loop.run, []

    def on_one_device(tree):
        return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))

    def checked(self, state):
        sampler, size = self.sample, memory.planned_bytes
        rest = on_one_device(state) - on_one_device(state.weights)
        programs = sampler.generator.programs
        assert self.needed[memory.EVALUATION] == size(self.validation.program) + rest
        most = max(size(program) for program in programs.values())
        assert self.needed[memory.SAMPLING] == most + on_one_device(state)
        assert programs.keys() == {8, 1}
        sampler.generator._append = sampler.generator.convert_weights = None  # what is jitted
        assert not hasattr(self.validation.program, "lower")
        seen.append(state)
        run(self, state)

    monkeypatch.setattr(loop.Loop, "run", checked)
    folder = start(data, tmp_path, "a", "--train.steps", "1")
    assert seen and (folder / "samples.jsonl").exists()


def test_two_different_settings_that_fit_are_named_the_faster_one_first():
    one = {"mesh.fsdp": 1, "mesh.pipeline": 1, "mesh.tensor": 1, "train.microbatches": 2}
    config = depth.parse(["--depth", "4", "--model.vocab_size", "4096"], checked=False)
    config = utils.changed(config, one | {"model.compute_dtype": "bfloat16"})
    [device] = chips("gpu", 1, kind=hardware.CHIPS["h100"].kinds[0])
    device.memory_stats, device.compute_capability = (lambda: None), "9.0"
    mesh = SimpleNamespace(local_devices=[device], devices=np.array([device]))
    # The compiled step needs twice what the plan says, and so will others.
    needed = 2 * cost.predict(config, hardware.CHIPS["h100"]).memory_bytes_per_chip
    text = advice.settings(config, mesh, memory.STEP, needed, 0.35 * needed)
    found = re.findall(r"(--[^()]+) \(([\d.]+) GiB, ([\d.]+) of the step time\)", text)
    (first, _, fast), (second, _, slow) = found
    assert re.findall(r"--\S+", first) != re.findall(r"--\S+", second)
    assert float(fast) <= float(slow)
    assert all(float(size) * utils.GIB <= 0.36 * needed for _, size, _ in found)
