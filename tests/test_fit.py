"""Which settings are chosen for the devices, and which are kept."""

import dataclasses

import jax
import pytest

import fit
import hardware
import main
import utils
from benchmarks import fit as benchmark_fit
from common import config_of
from devices import chips
from planning import search

H100 = hardware.CHIPS["h100"]
DTYPE = ["--model.compute_dtype", "auto"]


@pytest.mark.parametrize(
    ("count", "words", "shape", "virtual", "microbatches"),
    [
        (1, "", (1, 1, 1), 1, 4),
        (2, "", (2, 1, 1), 1, 4),
        (3, "", (2, 1, 1), 1, 4),
        (8, "", (2, 2, 2), 2, 4),
        (8, "--mesh.pipeline 1 --train.microbatches=2", (4, 1, 2), 1, 2),
        (8, "--mesh.tensor auto --mesh.virtual 1 --train.remat full", (2, 2, 2), 1, 4),
        (4, "--train.global_batch_size 2 --mesh.fsdp 2", (2, 1, 2), 1, 1),
    ],
)
def test_simulated_devices_get_a_mesh_with_every_axis(count, words, shape, virtual, microbatches):
    config = main.parse([*DTYPE, *words.split(), "--model.num_hidden_layers", "16"])
    made, text = fit.for_devices(config, chips("cpu", count))
    assert fit.why_not(made) is None and made.model.compute_dtype == "float32"
    assert made.mesh == config_of(shape, virtual).mesh
    assert made.train.microbatches == microbatches
    assert made.train.remat == ("full" if "full" in words else "none")
    assert text.startswith("chosen: --") and ("--mesh.pipeline " in text) == (
        "--mesh.pipeline" not in words
    )


def test_settings_that_are_set_are_kept_each_by_itself(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[mesh]\ntensor = 1\n[train]\nremat = "full"\n')
    for words in (["--mesh.tensor=1", "--train.remat", "full"], [f"--config={file}"]):
        config = main.parse(words)
        assert utils.left_open(config) == utils.AUTO.keys() - {"mesh.tensor", "train.remat"}
        made, _ = fit.for_devices(config, chips("cpu", 8))
        assert (made.mesh.tensor, made.train.remat) == (1, "full")
    words = [f"--config={file}", "--mesh.tensor", "auto", "--train.remat=auto"]
    assert utils.left_open(main.parse(words)) == utils.AUTO.keys()
    everything = [word for name, value in utils.AUTO.items() for word in (f"--{name}", value)]
    everything = ["full" if word == "auto" else str(word or 1) for word in everything]
    everything[-1] = "step"
    config = main.parse(everything)
    assert fit.for_devices(config, chips("cpu", 1)) == (config, "")
    made, idle = fit.for_devices(config, chips("cpu", 2))
    assert made == config and "has 1 of 2 devices; the others stay idle" in idle
    with pytest.raises(ValueError, match=r"4 devices cannot be divided by --mesh\.fsdp 8\. Use"):
        fit.for_devices(main.parse(["--mesh.fsdp", "8"]), chips("cpu", 4))


def test_the_planner_chooses_what_fits_and_is_fastest():
    config = main.parse([*DTYPE, "--train.global_batch_size", "32"])
    devices = chips("gpu", 2, kind=H100.kinds[0])
    made, text = fit.for_devices(config, devices)
    assert made.model.compute_dtype == "bfloat16"
    assert not utils.left_open(made) and fit.why_not(made) is None
    assert "the fastest of" in text and " of 80 GiB and " in text
    assert fit.for_devices(config, devices) == (made, text)
    kept = utils.changed(made, {"mesh.replica": 1})
    best = search.search(kept, H100, 2, frozenset({"model.experts_layout"})).best[0]
    chosen = search.candidate(kept, H100, made.train.remat)
    assert chosen.predicted.step_s <= 1.05 * best.predicted.step_s


def test_a_model_that_does_not_fit_names_the_number_of_devices_that_do(monkeypatch):
    small = dataclasses.replace(H100, memory_bytes=110 * 2**20)
    monkeypatch.setattr(hardware, "chip_of_kind", lambda kind: small)
    config = main.parse([*DTYPE, "--train.global_batch_size", "64", "--train.seq_len", "128"])
    asked, search_all = [], search.fastest
    count = lambda *args: asked.append(args[2]) or search_all(*args)  # noqa: E731
    monkeypatch.setattr(search, "fastest", count)
    message = r"2 x h100 are too few\. By the plan it fits (4|8|16) of them\. .*fits on no mesh"
    with pytest.raises(ValueError, match=message):
        fit.for_devices(config, chips("gpu", 2))
    assert asked == [2]  # a part of them is not tried


def test_without_a_plan_the_choice_takes_least_memory_and_says_why(monkeypatch):
    config = main.parse([*DTYPE, "--train.global_batch_size", "32"])
    made, text = fit.for_devices(config, chips("gpu", 8))
    assert made.train.microbatches == 4  # of one sequence each
    assert "no figures of host are known, so this takes least memory" in text
    assert made.mesh.shape == (1, 8, 1, 1, 1) and made.train.remat == "full"

    def fails(*_):
        raise ZeroDivisionError("planner")

    monkeypatch.setattr(search, "fastest", fails)
    same, text = fit.for_devices(config, chips("gpu", 8, kind=H100.kinds[0]))
    assert same == made
    assert "the planner failed (ZeroDivisionError: planner), so this takes least memory" in text


def test_on_several_hosts_no_device_stays_idle_and_a_slice_is_a_replica(monkeypatch):
    config = main.parse([*DTYPE, "--train.global_batch_size", "4"])
    assert "has 4 of 6 devices" in fit.for_devices(config, chips("gpu", 6))[1]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"no settings fit 6 x host of 2 processes\. .*divisible"):
        fit.for_devices(config, chips("gpu", 6))
    config = main.parse([*DTYPE, "--train.global_batch_size", "64"])
    made, _ = fit.for_devices(config, chips("tpu", 8, slices=2))
    assert made.mesh.replica == 2 and made.mesh.fsdp * made.mesh.pipeline * made.mesh.tensor == 4


@pytest.mark.parametrize(("layers", "machine"), [(6, "rtx4090:1"), (12, "a100-40gb:1")])
def test_a_depth_gets_settings_within_5_percent_of_what_a_whole_search_finds(layers, machine):
    found = benchmark_fit.row(layers, machine, benchmark_fit.Flags(search=True))
    _, depth, named, *_, step_s, best_s, _ = (cell.strip() for cell in found.split("|"))
    assert (depth, named) == (str(layers), machine)
    assert float(step_s) <= 1.05 * float(best_s)
