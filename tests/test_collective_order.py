"""XLA for CPUs starts a collective once the loop before it has started, unless data connects them.

If the loop has a collective of the same kind and ranks, devices that run both at once can send the
one what the other waits for. `run.sh` says which flags keep loops and collectives apart, and
runtime/collective_order.py orders the rest. The steps are those that test_model.py compiles.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import step_of
from planning import hlo
from runtime.collective_order import after, in_turn
from test_model import CASES, arguments

BODIES = ("body", "branch_computations", "true_computation", "false_computation", "to_apply")


def kinds(program, instruction):
    """Return the (kind, ranks) of the collectives of an instruction and of what it calls."""
    if instruction.opcode in hlo.COLLECTIVES:
        groups = hlo.device_groups(instruction.attributes)
        if groups and max(map(len, groups)) == 1:
            return set()
        permutes = instruction.opcode == "collective-permute"  # XLA takes all ranks as one group
        return {(instruction.opcode, () if permutes else tuple(map(tuple, groups)))}
    if instruction.opcode not in ("while", "conditional", "call"):
        return set()
    called = [program.computations[name] for name in instruction.computations(*BODIES)]
    return {kind for c in called for inner in c.values() for kind in kinds(program, inner)}


def element(program, computation, name, i):
    """Return what element `i` of a tuple is: an instruction, or (parameter, i). None if unknown.

    XLA gives an element that a loop or a branch returns unchanged the memory of its input. Nobody
    waits for the loop to read it.
    """
    instruction = computation[name]
    if instruction.opcode == "parameter":
        return name, i
    if instruction.opcode == "tuple":
        return source(program, computation, instruction.operands[i])
    if instruction.opcode == "while":
        branches = [(instruction.operands[0], instruction.computations("body")[0])]
    elif instruction.opcode == "conditional":
        called = instruction.computations(*BODIES)
        branches = list(zip(instruction.operands[1:], called, strict=True))
    else:
        return None
    found = set()
    for operand, branch in branches:
        inner = program.computations[branch]
        *_, root = inner
        inside = element(program, inner, root, i)
        if not isinstance(inside, tuple) or (instruction.opcode == "while" and inside[1] != i):
            return None
        found.add(element(program, computation, operand, inside[1]))
    return found.pop() if len(found) == 1 else None


def source(program, computation, name):
    """Return the instruction that computed a value, or (parameter, i)."""
    instruction = computation[name]
    if instruction.opcode == "bitcast":
        return source(program, computation, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        i = int(re.search(r"index=(\d+)", instruction.attributes)[1])
        return element(program, computation, instruction.operands[0], i) or name
    return name


def unordered(text):
    """Return the (collective or loop, loop before it) that can run at once and be mistaken."""
    program = hlo.parse(text)
    found, all_loops = [], 0
    for computation in program.computations.values():
        loops_before, loops = {}, {}
        for name, instruction in computation.items():  # in the order of execution
            origin = source(program, computation, name)
            used = instruction.operands if origin == name else [origin]
            before = set().union(*(loops_before.get(o, ()) for o in used))
            if own := kinds(program, instruction):
                found += [
                    (name, loop) for loop, of in loops.items() if loop not in before and of & own
                ]
                if instruction.opcode not in hlo.COLLECTIVES:
                    loops[name] = own
                    before = before | {name}
            loops_before[name] = before
        all_loops += len(loops)
    assert all_loops
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_collective_of_a_step_waits_for_the_loops_before_it(name):
    compiled = step_of(CASES[name]).lower(*arguments(CASES[name])).compile()
    assert not unordered(compiled.as_text())


def test_numbers_that_are_not_finite_change_no_value():
    w, x = {"a": jnp.array([jnp.nan, 3.0]), "n": jnp.array([4])}, jnp.array([[jnp.inf], [5.0]])
    for found, tree in ((after(w, x), w), (after(x, w), x), (in_turn(w, x), (w, x))):
        jax.tree.map(np.testing.assert_array_equal, found, tree)
