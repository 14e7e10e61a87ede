import dataclasses
import functools
import itertools
import math

import pytest

import hardware
import make_compiled
import utils
from planning import cost, results, search

V4, V5E, H100 = (hardware.CHIPS[name] for name in ("v4", "v5e", "h100"))
_, JAXFORMER = make_compiled.config_of("jaxformer")
_, MOE = make_compiled.config_of("gpu-moe-none-8x1x1")
_, DENSE = make_compiled.config_of("dense-names-4x4x2")


@pytest.fixture(scope="module")
def found():
    return search.search(JAXFORMER, V4, 32)


def test_all_meshes_of_a_number_of_chips_are_listed():
    assert len(search.meshes(32)) == 21 == len(set(search.meshes(32)))
    assert all(math.prod(mesh) == 32 for mesh in search.meshes(32))
    assert search.meshes(64, replica=2) == search.meshes(32) and not search.meshes(33, replica=2)


def test_every_mesh_is_either_ranked_or_rejected_with_a_reason(found):
    ranked = {c.config.mesh.shape[1:] for c in found.best}
    assert ranked | set(found.rejected) == set(search.meshes(32))
    assert not ranked & set(found.rejected)
    assert (
        "--model.num_attention_heads 12 is not divisible by --mesh.tensor 8"
        in found.rejected[4, 1, 8]
    )


def test_the_best_comes_first_and_fits(found):
    times = [c.predicted.serial_step_s for c in found.best]
    assert times == sorted(times)
    assert all(c.memory <= results.usable_bytes(V4) for c in found.best)


def test_shared_traces_predict_what_separate_traces_predict(found):
    for candidate in found.best[::4]:
        shared, own = candidate.predicted, cost.predict(candidate.config, V4)
        close = functools.partial(pytest.approx, rel=0.002)  # slots of experts are rounded once
        assert shared.memory_bytes_per_chip == close(own.memory_bytes_per_chip)
        assert shared.flops_per_chip == close(own.flops_per_chip)
        assert shared.collective_bytes_per_chip == close(own.collective_bytes_per_chip)
        # What the loss does once for all its chunks is counted for every two of them.
        assert shared.serial_step_s == pytest.approx(own.serial_step_s, rel=0.02)


@pytest.mark.parametrize(
    "memory",
    [1, pytest.param(1 / 4, marks=pytest.mark.long)],
    ids=["v4", "quarter of its memory"],
)
def test_no_neighbour_of_the_best_is_faster(found, memory):
    """Each setting that a search chooses is changed by hand."""
    chip = dataclasses.replace(V4, memory_bytes=int(V4.memory_bytes * memory))
    best = (found if chip == V4 else search.search(JAXFORMER, chip, 32)).best[0]
    changes = [
        *({"train.microbatches": m} for m in cost.divisors(256 // best.config.mesh.fsdp)),
        *({"train.remat": policy} for policy in search.remat_policies(JAXFORMER, V4)),
        {"fsdp.gather": "layer"},
        {"fsdp.gather": "step"},
        {"model.experts_layout": "expert_parallel"},
        {"model.experts_layout": "sharded"},
    ]
    for change in changes:
        try:
            other = cost.predict(utils.changed(best.config, change), chip, shared=True)
        except ValueError:
            continue
        assert not other.fits or other.serial_step_s >= best.predicted.serial_step_s


def test_given_flags_are_fixed():
    fixed = frozenset(["train.remat", "mesh.tensor", "train.microbatches"])
    found = search.search(JAXFORMER, V4, 32, fixed)
    assert found.best
    for candidate in found.best:
        c = candidate.config
        assert c.train.remat == JAXFORMER.train.remat
        assert c.mesh.tensor == 2 and c.train.microbatches == 8


def test_experts_are_sharded_on_one_host_if_all_of_them_fit():
    """One host of H100s has room for all experts, and no reason to send every token to them."""
    flags = dict.fromkeys(results.MESH_FLAGS, 1) | {"mesh.fsdp": 8}
    fixed = frozenset(results.MESH_FLAGS)
    found = search.search(utils.changed(MOE, flags | {"mesh.virtual": 1}), H100, 8, fixed)
    assert found.best[0].config.model.experts_layout == "sharded"
    spread = {"model.experts_layout": "expert_parallel"}
    other = cost.predict(utils.changed(found.best[0].config, spread), H100)
    assert other.serial_step_s > 1.1 * found.best[0].predicted.serial_step_s


def test_remat_policies_save_less_and_less_of_the_models_residuals():
    policies = search.remat_policies(DENSE, V4)
    assert policies[0] == "none" and policies[-1] == "full"
    names = [set(policy.split(",")) for policy in policies[1:-1]]
    assert names[0] == {"latents", "attention", "attention_out", "mlp_in", "hidden"}
    assert all(len(more - less) == 1 for more, less in itertools.pairwise(names))
    memory = [sum(cost.memory(cost.Step(utils.changed(DENSE, {"train.remat": p}), "tpu")).values())
              for p in policies[1:]]  # fmt: skip
    assert memory == sorted(memory, reverse=True)


def test_a_number_of_chips_that_no_mesh_has_is_refused_with_a_reason():
    with pytest.raises(ValueError, match=r"--chips 7: .* Use another number .*\(7, 1, 1\): --tr"):
        search.search(JAXFORMER, V4, 7)


@pytest.mark.parametrize(
    "chips_wanted, fixed, message",
    [
        (4, {"mesh.fsdp": 8}, r"--chips 4 does not match --mesh.fsdp 8. Use a multiple of 8"),
        (
            16,
            {"mesh.pipeline": 16},
            r"with --mesh.pipeline 16 the model divides over no mesh of 16",
        ),
        (10**9, {}, r"--chips 1000000000 is more than 131072"),
        (
            4099,
            {},
            r"--chips 4099: the model divides over no mesh of 4099 chips. Use another number",
        ),
    ],
)
def test_impossible_numbers_of_chips_are_refused_quickly(chips_wanted, fixed, message):
    config = JAXFORMER
    for flag, value in fixed.items():
        section, key = flag.split(".")
        part = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: part})
    with pytest.raises(ValueError, match=message):
        search.search(config, V4, chips_wanted, frozenset(fixed))


@pytest.mark.long
def test_a_search_without_a_fit_returns_the_smallest_candidate():
    large = utils.changed(JAXFORMER, {"model.hidden_size": 8192, "model.num_hidden_layers": 384})
    found = search.search(large, V5E, 8)
    assert not found.best
    least = found.smallest
    assert least.config.train.remat == "full"
    needs = [reason for reason in found.rejected.values() if "GiB of 13.6 GiB at least" in reason]
    smallest = min(float(reason.split()[1]) for reason in needs)
    assert least.predicted.memory_bytes_per_chip / 2**30 == pytest.approx(smallest, abs=0.06)


@pytest.mark.long
def test_a_search_without_a_chip_ranks_by_flops():
    found = search.search(JAXFORMER, None, 8)
    assert found.best and found.best[0].predicted.seconds is None
    assert {candidate.config.train.remat for candidate in found.best} == {"none"}
