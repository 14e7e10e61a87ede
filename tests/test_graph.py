"""The graph of one small pipelined step, compiled once, and of texts written by hand."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import model
import pipeline
import sharded_model
from common import batch_of, collective_bytes, config_of, mesh_of, on_mesh
from planning import graph, hlo
from planning.graph import Scope


class Step(NamedTuple):
    text: str
    branch_share: hlo.BranchShare
    graph: graph.Graph


@pytest.fixture(scope="module")
def step():
    config = config_of((1, 2, 2), blocks=2, train={"remat": "full"})
    mesh, declared = mesh_of(config), model.declare(config)
    weights = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(
            w.shape, jnp.float32, sharding=jax.NamedSharding(mesh, w.spec)
        ),
        declared,
    )
    data = on_mesh(config, mesh, batch_of(config))
    run = jax.jit(sharded_model.loss_and_gradients(config, model.declare(config), mesh))
    text = run.lower(weights, data, jnp.int32(0)).compile().as_text()
    share = pipeline.branch_share(sharded_model.schedule_of(config))
    return Step(text, share, graph.graph(text, share))


@pytest.fixture(scope="module")
def svg(step, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "new" / "step.svg"
    graph.draw(step.text, path, "a small step", step.branch_share)
    return path


def bytes_between(found):
    return {(edge.source, edge.target): edge.bytes for edge in found.edges}


def test_nodes_add_up_to_the_products_and_collectives_of_the_program(step):
    sent = Counter()
    for node in step.graph.nodes:
        sent.update(dict(node.collectives))
    products = sum(node.flops for node in step.graph.nodes)
    assert products == pytest.approx(hlo.dot_flops(step.text, step.branch_share), rel=1e-12)
    assert sent == pytest.approx(collective_bytes(step.text, step.branch_share), rel=1e-12)


def test_each_layer_is_in_the_phases_and_directions_in_which_it_runs(step):
    forward = {(layer, "forward") for layer in ("first", "attention", "mlp", "moe")}
    again = {
        (layer, way) for layer in ("attention", "mlp", "moe") for way in ("recomputed", "backward")
    }
    again |= {("first_backward", "backward")}
    loss = {("last", way) for way in ("forward", "backward")}
    expected = {
        "before": set(),
        "warmup": forward,
        "steady": forward | loss | again,
        "cooldown": again,
        "after": set(),
    }
    places = [node.scope for node in step.graph.nodes]
    assert len(places) == len(set(places))
    assert set(places) == {
        Scope(phase, *layer)
        for phase, layers in expected.items()
        for layer in layers | {("other", "")}
    }


def test_a_layer_costs_the_same_per_tick_in_every_phase(step):
    flops = {node.scope: node.flops for node in step.graph.nodes}
    # One tick of warmup and of cooldown, and four of both.
    for layer in ("attention", "mlp", "moe"):
        forward = flops[Scope("warmup", layer, "forward")]
        assert flops[Scope("steady", layer, "forward")] == 4 * forward > 0
        for way in ("recomputed", "backward"):
            once = flops[Scope("cooldown", layer, way)]
            assert flops[Scope("steady", layer, way)] == 4 * once > 0
        assert flops[Scope("cooldown", layer, "backward")] == 2 * forward


def test_nodes_are_in_the_order_in_which_they_run(step):
    layers = [n.scope.layer for n in step.graph.nodes if n.scope.phase == "warmup"]
    assert layers == ["first", "attention", "mlp", "moe", "other"]


def test_edges_go_along_the_layers_and_back(step):
    sent = bytes_between(step.graph)
    x = 4 * 8 * 48 * 4  # bytes of [b, t, D]
    for phase, ticks in (("warmup", 1), ("steady", 4)):
        here = {layer: Scope(phase, layer, "forward") for layer in ("attention", "mlp", "moe")}
        for target in ("mlp", "moe"):
            assert sent[here["attention"], here[target]] >= ticks * x
        assert (here["moe"], here["mlp"]) not in sent
    last = Scope("steady", "last", "forward")
    assert sent[Scope("steady", "moe", "forward"), last] >= 4 * x
    for phase in ("steady", "cooldown"):
        back = {layer: Scope(phase, layer, "backward") for layer in ("attention", "mlp", "moe")}
        assert sent[back["moe"], back["attention"]] >= x
        assert sent[back["mlp"], back["attention"]] >= x
        assert sent[back["attention"], Scope(phase, "first_backward", "backward")] >= x
        for layer, place in back.items():
            assert sent[Scope(phase, layer, "recomputed"), place] > 0


def test_the_ring_goes_from_the_phase_that_fills_it_to_those_that_empty_it(step):
    sent = bytes_between(step.graph)
    filled = Scope("warmup", "mlp", "forward")
    for phase in ("steady", "cooldown"):
        assert sent[filled, Scope(phase, "attention", "recomputed")] > 0


def test_weights_come_in_before_the_ticks_and_gradients_go_out_after(step):
    sent = bytes_between(step.graph)
    before, after = Scope("before", "other", ""), Scope("after", "other", "")
    assert all(edge.target.phase != "before" for edge in step.graph.edges)
    assert all(edge.source.phase != "after" for edge in step.graph.edges)
    assert {source.phase for source, target in sent if target == after} >= {"steady", "cooldown"}
    for node in step.graph.nodes:
        if node.flops:
            assert sent[before, node.scope] > 0


# Three ticks of attention, a fusion of an mlp with unnamed instructions, and a ring of slots.
TEXT = """HloModule step, is_scheduled=true

%fused (p: f32[4,8], q: f32[8,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,8]{1,0} parameter(1)
  %again = f32[4,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %guess = f32[4,8]{1,0} negate(%again), metadata={op_name="jit(s)/steady/neg.7"}
}

%body (b: (s32[], f32[4,8], f32[8,8], f32[5,4,8])) -> (s32[], f32[4,8], f32[8,8], f32[5,4,8]) {
  %b = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}, f32[5,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%b), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%b), index=2
  %ring = f32[5,4,8]{2,1,0} get-tuple-element(%b), index=3
  %xw = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(s)/steady/while/body/jvp(attention)/dot_general"}
  %start = (f32[4,8]{1,0}, f32[4,8]{1,0}) copy-start(%xw)
  %done = f32[4,8]{1,0} copy-done(%start)
  %y = f32[4,8]{1,0} fusion(%done, %w), kind=kOutput, calls=%fused, \
metadata={op_name="jit(s)/steady/while/body/jvp(mlp)/neg"}
  %zero = s32[] constant(0)
  %slot = f32[1,4,8]{2,1,0} bitcast(%y)
  %stored = f32[5,4,8]{2,1,0} dynamic-update-slice(%ring, %slot, %i, %zero, %zero)
  %read = f32[1,4,8]{2,1,0} dynamic-slice(%stored, %i, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %d = f32[1,4,8]{2,1,0} negate(%read), \
metadata={op_name="jit(s)/steady/while/body/transpose(jvp(mlp))/neg"}
  %d2 = f32[1,4,8]{2,1,0} sine(%d), metadata={op_name="checkpoint/rematted_computation/mlp/sin"}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}, f32[5,4,8]{2,1,0}) tuple(%next, %y, %w, %stored)
}

%condition (c: (s32[], f32[4,8], f32[8,8], f32[5,4,8])) -> pred[] {
  %c = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}, f32[5,4,8]{2,1,0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(3)
  ROOT %go = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (u: f32[4,8], v: f32[8,8]) -> f32[4,8] {
  %u = f32[4,8]{1,0} parameter(0)
  %v = f32[8,8]{1,0} parameter(1)
  %aside = f32[8,8]{1,0} negate(%v)
  %nothing = s32[] constant(0)
  %none = f32[] constant(0)
  %empty = f32[5,4,8]{2,1,0} broadcast(%none), dimensions={}
  %cast = f32[8,8]{1,0} negate(%v)
  %state = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}, f32[5,4,8]{2,1,0}) \
tuple(%nothing, %u, %cast, %empty)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}, f32[5,4,8]{2,1,0}) while(%state), \
condition=%condition, body=%body, metadata={op_name="jit(s)/steady/while"}
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %moved = f32[4,8]{1,0} add(%out, %aside)
}
"""
BEFORE, AFTER = Scope("before", "other", ""), Scope("after", "other", "")
TICK = Scope("steady", "other", "")
ATTENTION, MLP = Scope("steady", "attention", "forward"), Scope("steady", "mlp", "forward")
AGAIN, BACK = Scope("steady", "mlp", "recomputed"), Scope("steady", "mlp", "backward")


def test_unnamed_instructions_count_for_their_caller_and_loops_once_per_trip():
    found = {node.scope: node for node in graph.graph(TEXT).nodes}
    product = 2 * 4 * 8 * 8
    assert {place: node.flops for place, node in found.items() if node.flops} == {
        ATTENTION: 3 * product,
        MLP: 3 * product,
    }
    # mlp: a fusion of two. In no layer: the loop, each trip's two copies, slot and next, 4 checks.
    assert {place: node.instructions for place, node in found.items()} == {
        BEFORE: 2,
        ATTENTION: 3,
        MLP: 3 * 3,
        BACK: 3,
        AGAIN: 3,
        TICK: 1 + 3 * 5 + 4,
        AFTER: 2,
    }


def test_edges_pass_through_tuples_copies_slices_and_trips():
    w, x = 8 * 8 * 4, 4 * 8 * 4
    assert bytes_between(graph.graph(TEXT)) == {
        (BEFORE, ATTENTION): 3 * w + x,  # x comes in once
        (BEFORE, MLP): 3 * w,
        (ATTENTION, MLP): 3 * x,
        (MLP, ATTENTION): 2 * x,  # from the trip before
        (MLP, BACK): 3 * x,  # out of the ring, a slot and not the whole
        (BACK, AGAIN): 3 * x,
        (MLP, AFTER): x,
        (BEFORE, AFTER): w,  # what the ticks do not need, though it is written before them
    }


def test_concatenated_slices_keep_their_makers():
    text = TEXT.replace(
        "copy-done(%start)", 'custom-call(%start), custom_call_target="ConcatBitcast"'
    )
    assert text != TEXT
    assert bytes_between(graph.graph(text)) == bytes_between(graph.graph(TEXT))


def test_an_asynchronous_collective_counts_once_and_its_value_is_made_where_it_starts():
    text = TEXT.replace("copy-start(", "collective-permute-start(")
    text = text.replace("copy-done(", "collective-permute-done(")
    found = graph.graph(text)
    sent = {node.scope: node.collectives for node in found.nodes if node.collectives}
    assert sent == {TICK: (("collective-permute", 3 * 4 * 8 * 4),)}
    assert {(ATTENTION, TICK), (TICK, MLP)} <= set(bytes_between(found))
    assert (ATTENTION, MLP) not in bytes_between(found)


LOOKUP = """ENTRY %main (t: f32[100,8], i: s32[3,1], d: f32[3,8]) -> f32[100,8] {
  %t = f32[100,8]{1,0} parameter(0)
  %i = s32[3,1]{1,0} parameter(1)
  %d = f32[3,8]{1,0} parameter(2)
  %rows = f32[3,8]{1,0} gather(%t, %i), offset_dims={1}
  ROOT %sum = f32[100,8]{1,0} scatter(%t, %i, %d), update_window_dims={1}
}
"""


@pytest.mark.parametrize("reader", ["rows", "sum"])
def test_only_the_rows_of_a_table_that_are_used_are_read(reader):
    entry = hlo.parse(LOOKUP).computations["main"]
    assert graph.read_bytes(entry[reader], 0, entry) == 3 * 8 * 4
    assert graph.read_bytes(entry[reader], 1, entry) == 3 * 4


def test_a_layer_before_the_blocks_is_forward_again_for_the_gradient_of_the_embedding():
    caller = Scope("steady", "first_backward", "backward")
    path = "jit(s)/steady/while/body/first_backward/cond/branch_1_fun"
    for scopes, way in (("jvp(attention)", "recomputed"), ("transpose(jvp(mlp))", "backward")):
        found = graph.scope_of(f"{path}/{scopes}/mul", "steady", caller)
        assert found.direction == way and found.layer in scopes


def test_a_forward_name_in_cooldown_is_of_something_recomputed():
    caller = Scope("cooldown", "other", "")
    shared = "jit(s)/warmup/while/body/jvp(moe)/mul"
    assert graph.scope_of(shared, "cooldown", caller) == Scope("cooldown", "moe", "recomputed")


BRANCHES = """
%no (n: f32[8,8]) -> f32[8,8] {
  ROOT %n = f32[8,8]{1,0} parameter(0)
}

%yes (m: f32[8,8]) -> f32[8,8] {
  %m = f32[8,8]{1,0} parameter(0)
  ROOT %mm = f32[8,8]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: pred[], v: f32[8,8], u: f32[8,8]) -> f32[8,8] {
  %p = pred[] parameter(0)
  %v = f32[8,8]{1,0} parameter(1)
  %u = f32[8,8]{1,0} parameter(2)
  %minus = f32[8,8]{1,0} sine(%v), metadata={op_name="jit(s)/steady/attention/sin"}
  ROOT %maybe = f32[8,8]{1,0} conditional(%p, %minus, %u), true_computation=%yes, \
false_computation=%no, metadata={op_name="jit(s)/steady/last/cond"}
}
"""


def test_a_branch_counts_and_reads_by_its_share():
    found = graph.graph(BRANCHES, lambda name: [0.75, 0.25])
    last = Scope("steady", "last", "forward")
    assert {n.scope: n.flops for n in found.nodes}[last] == 0.25 * 2 * 8**3
    assert bytes_between(found)[ATTENTION, last] == 0.25 * 8 * 8 * 4
    with pytest.raises(ValueError, match="it is unknown how often"):
        graph.graph(BRANCHES)
    same = graph.graph(BRANCHES.replace("dot(%m, %m)", "multiply(%m, %m)"))
    assert bytes_between(same)[ATTENTION, last] == 0.5 * 8 * 8 * 4


def test_a_loop_of_unknown_length_is_refused_if_it_multiplies_and_runs_once_if_not():
    text = TEXT.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="no known trip count"):
        graph.graph(text)
    found = graph.graph(text.replace(" dot(", " add("))
    assert {node.scope: node.instructions for node in found.nodes}[ATTENTION] == 1


def test_a_program_without_phases_is_refused():
    with pytest.raises(ValueError, match=r"none of the named scopes warmup.*compiled step"):
        graph.graph(BRANCHES.replace("steady", "evaluate"), lambda name: [0.75, 0.25])


def texts_of(path):
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_the_svg_has_the_names_and_costs_of_all_nodes_as_text(step, svg):
    written = Counter(texts_of(svg))
    names = Counter(node.scope.name for node in step.graph.nodes)
    assert {name: written[name] for name in names} == names
    assert {"warmup", "steady", "cooldown", "a small step"} <= set(written)
    node = next(n for n in step.graph.nodes if n.scope == Scope("steady", "moe", "backward"))
    share = node.flops / sum(n.flops for n in step.graph.nodes)
    assert f"{graph.quantity(node.flops, 'FLOP')}, {share:.1%}" in written
    for kind, sent in node.collectives:
        assert f"{kind} {graph.quantity(sent, 'B')}" in written


def test_the_same_program_makes_the_same_file(step, svg, tmp_path):
    again = tmp_path / "again.svg"
    graph.draw(step.text, again, "a small step", step.branch_share)
    assert again.read_bytes() == svg.read_bytes()


def test_boxes_do_not_overlap_and_are_in_their_phase(step):
    plan = graph.layout(step.graph)
    boxes = list(plan.nodes.items())
    for number, (scope, box) in enumerate(boxes):
        band = plan.bands[scope.phase]
        assert band.left < box.left < box.right < band.right < plan.width
        assert band.top < box.top < box.bottom < band.bottom < plan.height
        for _, other in boxes[:number]:
            apart = box.right < other.left or other.right < box.left
            assert apart or box.bottom < other.top or other.bottom < box.top


def test_every_node_has_an_arrow_for_its_largest_edge(step):
    edges = graph.shown(step.graph.edges)
    assert {n.scope for n in step.graph.nodes} == {p for e in edges for p in (e.source, e.target)}
    most = {e.source: e for e in sorted(step.graph.edges, key=lambda e: e.bytes)}
    assert set(most.values()) <= set(edges)
    assert [e.bytes for e in edges] == sorted(e.bytes for e in edges)
    assert len(edges) < len(step.graph.edges)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (2.5e6, "2.5 MB"), (43e9, "43 GB")],
)
def test_quantities_have_three_digits(value, expected):
    assert graph.quantity(value, "B") == expected


def test_another_kind_of_picture_is_refused_before_the_text_is_read():
    with pytest.raises(ValueError, match=r"runs/step.png.*does not end in .svg. Use runs/step.svg"):
        graph.draw("not a program", Path("runs/step.png"), "a step")
