import itertools
import math
from types import SimpleNamespace

import pytest

import depth
import hardware
import make_compiled
import memory
import utils
from common import config_of
from planning import advice, cost, results, search

V4, H100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]
# With fewer microbatches, so that a search tries less, and heads that 4 does not divide.
SMALLER = {"train.global_batch_size": 32, "model.num_attention_heads": 6}
JAXFORMER = utils.changed(make_compiled.config_of("jaxformer"), SMALLER)


def meshes(chips):
    return hardware.meshes(utils.Config(), chips)


@pytest.fixture(scope="module")
def found():
    return search.search(JAXFORMER, V4, 4, frozenset(["model.experts_layout"]))


def test_all_meshes_of_a_number_of_chips_are_listed():
    found, config = meshes(32), utils.Config()
    assert len(found) == 21 == len(set(found))
    assert all(math.prod(mesh) == 32 for mesh in found)
    replicas = utils.changed(config, {"mesh.replica": 2})
    assert hardware.meshes(replicas, 64) == found and not hardware.meshes(replicas, 33)
    # A rank of context that is not set has at least 4,096 positions.
    long = hardware.meshes(utils.changed(config, {"train.seq_len": 16384}), 32)
    assert {context for _, _, context, _ in long} == {1, 2, 4} and set(found) < set(long)
    assert hardware.meshes(config, 32, (0, 1, 8, 1)) == [(4, 1, 8, 1)]


def test_every_mesh_is_ranked_or_rejected_with_a_reason_and_the_best_comes_first(found):
    ranked = {c.config.mesh.shape[1:] for c in found.best}
    assert sorted([*ranked, *found.rejected]) == sorted(meshes(4))
    heads = "--model.num_attention_heads 6 is not divisible by --mesh.tensor 4"
    assert heads in found.rejected[1, 1, 1, 4]
    times = [c.predicted.step_s for c in found.best]
    assert times == sorted(times)
    assert all(c.predicted.memory_bytes_per_chip <= results.usable_bytes(V4) for c in found.best)


def test_shared_traces_predict_what_separate_traces_predict(found):
    for candidate in found.best[::2]:
        shared, own = candidate.predicted, cost.predict(candidate.config, V4)
        for name in ("memory_bytes", "flops", "collective_bytes"):
            of_each = (getattr(p, f"{name}_per_chip") for p in (shared, own))
            assert next(of_each) == pytest.approx(next(of_each), rel=0.002)  # slots are rounded
        # What the loss does once for all its chunks is counted for every two of them.
        assert shared.step_s == pytest.approx(own.step_s, rel=0.02)
    dropless = config_of((2, 1, 4), capacity_factor=0.0, train={"remat": "hidden,expert_in"})
    shared, own = (cost.predict(dropless, V4, shared=s) for s in (True, False))
    assert shared.flops_per_chip == own.flops_per_chip
    assert shared.memory_bytes_per_chip == own.memory_bytes_per_chip
    grouped = make_compiled.config_of("gpu-moe-dropless-names-2x2x2-interleaved")
    shared, own = (cost.predict(grouped, hardware.CHIPS["h100"], shared=s) for s in (True, False))
    assert shared.flops_per_chip == pytest.approx(own.flops_per_chip, rel=0.01)
    assert shared.memory_bytes_per_chip == pytest.approx(own.memory_bytes_per_chip, rel=0.1)
    assert shared.step_s == pytest.approx(own.step_s, rel=0.05)


def test_no_neighbour_of_the_best_is_faster(found):
    best = found.best[0]
    changes = [
        *({"train.microbatches": m} for m in cost.divisors(32 // best.config.mesh.fsdp)),
        *({"train.remat": policy} for policy in search.remat_policies(best.config, V4)),
        *({"fsdp.gather": gather} for gather in ("layer", "step")),
    ]
    tried = 0
    for change in changes:
        try:
            other = cost.predict(utils.changed(best.config, change), V4, shared=True)
        except ValueError:
            continue
        tried += 1
        assert not other.fits or other.step_s >= best.predicted.step_s
    assert tried > 10


@pytest.mark.parametrize(
    ("mesh", "gathers"),
    [
        ((1, 2, 1, 2), {"step"}),
        ((1, 1, 4, 1), {"step", "layer"}),
        ((4, 1, 1, 1), {"step", "layer"}),
    ],
)
def test_weights_that_are_sharded_over_fsdp_or_context_may_be_gathered_by_layer(mesh, gathers):
    config = config_of(train={"global_batch_size": 16})
    sizes = dict(zip(search.MESH_FLAGS, mesh, strict=True))
    config = search.changed(config, sizes | {"fsdp.gather": "step"})
    assert {c["fsdp.gather"] for c in search.choices_on(config, mesh, frozenset())} == gathers
    advised = [change.get("fsdp.gather", "step") for change in advice.changes(config, memory.STEP)]
    assert {"step", *advised} == gathers


def test_a_split_backward_pass_is_chosen_where_the_bubble_is_long_and_has_no_more_chunks():
    """By the plan five virtual stages are better, and two ranks are not worth the copies."""
    config = make_compiled.config_of("dense-names-4x4x2")
    fixed = frozenset(results.SEARCHED_FLAGS) - {"mesh.virtual", "pipeline.split_backward"}
    chosen = {}
    for pipeline, layers in ((4, 4), (4, 20), (2, 2)):
        sizes = {"mesh.fsdp": 16 // pipeline, "mesh.pipeline": pipeline, "train.microbatches": 4}
        sizes |= {"mesh.virtual": 1, "model.num_hidden_layers": layers}
        one = search.search(utils.changed(config, sizes), V4, 32, fixed).best[0].config
        chosen[pipeline, layers] = one.mesh.virtual, one.pipeline.split_backward
    assert chosen == {(4, 4): (1, True), (4, 20): (5, False), (2, 2): (1, False)}


def test_given_flags_are_fixed():
    fixed = frozenset(["train.remat", "mesh.tensor", "train.microbatches"])
    configs = [candidate.config for candidate in search.search(JAXFORMER, V4, 8, fixed).best]
    found = {(c.train.remat, c.mesh.tensor, c.train.microbatches) for c in configs}
    assert found == {(JAXFORMER.train.remat, 2, 8)}


def test_experts_are_sharded_on_one_host_if_all_of_them_fit():
    fixed = frozenset([*results.MESH_FLAGS, "train.microbatches"])
    config = make_compiled.config_of("gpu-moe-none-8x1x1")
    found = search.search(config, H100, 8, fixed)
    assert found.best[0].config.model.experts_layout == "sharded"
    spread = {"model.experts_layout": "expert_parallel"}
    other = cost.predict(utils.changed(found.best[0].config, spread), H100)
    assert other.step_s > 1.05 * found.best[0].predicted.step_s


def test_remat_policies_save_less_and_less_of_the_models_residuals():
    policies = search.remat_policies(make_compiled.config_of("dense-names-4x4x2"), V4)
    assert policies[0] == "none" and policies[-1] == "full"
    names = [set(policy.split(",")) for policy in policies[1:-1]]
    assert names[0] == {"latents", "attention", "attention_out", "mlp_in", "hidden"}
    assert all(len(more - less) == 1 for more, less in itertools.pairwise(names))


@pytest.mark.parametrize(
    "chips, fixed, message",
    [
        (4, {"fsdp": 8}, r"--chips 4 does not match --mesh.fsdp 8\. Use .* omit the mesh flags"),
        (16, {"pipeline": 16}, r"--mesh.pipeline 16: .*no mesh\. .*= \(1, 16, 1\): "),
        (7, {}, r"--chips 7: .* Use another number .*\(7, 1, 1\): --tr"),
    ],
)
def test_impossible_numbers_of_chips_are_refused_with_a_reason(chips, fixed, message):
    fields = {f"mesh.{axis}": size for axis, size in fixed.items()}
    with pytest.raises(ValueError, match=message):
        search.search(utils.changed(JAXFORMER, fields), V4, chips, frozenset(fields))


def test_a_search_without_a_chip_ranks_by_flops():
    found = search.search(JAXFORMER, None, 1, frozenset(["train.microbatches"]))
    assert found.best and found.best[0].predicted.seconds is None
    assert {candidate.config.train.remat for candidate in found.best} == {"none"}


def test_a_quick_search_leaves_out_axes_with_as_many_ranks_as_were_slower():
    def found(*pairs):
        return [SimpleNamespace(config=config_of(mesh), order=order) for mesh, order in pairs]

    one, pipeline, tensor = (1, 8, 1, 1, 1), (1, 4, 2, 1, 1), (1, 4, 1, 1, 2)
    assert not search.is_slower([], one[1:])
    assert not search.is_slower(found((one, 2)), pipeline[1:])  # nothing to compare with
    both = found((one, 2), (pipeline, 1), (tensor, 3))
    left_out = {mesh for mesh in meshes(8) if search.is_slower(both, mesh)}
    names = {"x".join(map(str, (fsdp, pipeline, tensor))) for fsdp, pipeline, _, tensor in left_out}
    assert names == {"4x1x2", "2x1x4", "1x1x8", "2x2x2", "1x2x4", "1x4x2"}
    pipelines = found((pipeline, 2), ((1, 2, 4, 1, 1), 3))
    assert search.is_slower(pipelines, (1, 8, 1, 1))
    assert not search.is_slower(pipelines, (1, 2, 1, 4))
    context = found((one, 2), ((1, 4, 1, 2, 1), 3))
    assert search.is_slower(context, (2, 2, 2, 1)) and not search.is_slower(context, (2, 2, 1, 2))


def test_where_the_best_rough_candidate_does_not_fit_another_one_is_found():
    """Evaluation and the loop over tiles are not in rough predictions."""
    config = depth.parse(["--depth", "4", "--model.vocab_size", "50257", "--mesh.virtual", "1"])
    config = utils.changed(config, {**utils.AUTO, "mesh.replica": 1})
    config = utils.changed(config, {"model.experts_kernel": "tiles"})
    for gib in (3.9, 3.95, 4.0):
        chip = hardware.chip_named(f"name=x,flops=165,memory={gib},bandwidth=1008,link=32")
        one = utils.for_platform(config, hardware.platform_of(chip))
        best, _ = search.fastest(one, chip, 1)
        assert best.predicted.fits and best.predicted.evaluation_bytes > 0
