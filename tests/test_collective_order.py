"""XLA for CPUs starts a collective once the loop before it has started, unless data connects them.

Devices that run both at once can wait for each other in different ones. `run.sh` says which flags
keep the two apart.
"""

import pytest

import model
import sharded_model
import train
from common import config_of, mesh_of
from planning import hlo

BODIES = ("body", "branch_computations", "true_computation", "false_computation", "to_apply")


def unordered(text):
    """Return (collective, loop) of the main computation that may run at once."""
    program = hlo.parse(text)

    def communicates(instruction):
        if instruction.opcode in hlo.COLLECTIVES:
            return True
        if instruction.opcode not in ("while", "conditional", "call"):
            return False
        names = instruction.computations(*BODIES)
        return any(communicates(i) for name in names for i in program.computations[name].values())

    loops_before, found, loops = {}, [], []
    for instruction in program.computations[program.entry].values():  # in the order of execution
        before = set().union(*(loops_before.get(name, ()) for name in instruction.operands))
        if communicates(instruction):
            found += [(instruction.name, loop) for loop in loops if loop not in before]
            if instruction.opcode not in hlo.COLLECTIVES:
                loops.append(instruction.name)
                before = before | {instruction.name}
        loops_before[instruction.name] = before
    assert loops
    return found


@pytest.mark.parametrize("gather", ["step", "layer"])
def test_collectives_outside_the_loop_over_microbatches_wait_for_it(gather):
    c = config_of(
        (2, 1, 2),
        gather=gather,
        prefix_layers=2,
        train={"microbatches": 1, "global_batch_size": 4},
        optimizer={"name": "muon"},
    )
    mesh, declared = mesh_of(c), model.declare(c)
    arguments = train.abstract_state(c, declared, mesh), sharded_model.abstract_batch(c, mesh)
    step = train.jitted_step(c, declared, mesh).lower(*arguments).compile()
    assert not unordered(step.as_text())
