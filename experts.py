"""Experts: their weights, and the dispatch of tokens within the capacity of each expert.

routing.py chooses the experts of a token, model.moe is the layer, and dropless.py has the dispatch
without a capacity. A choice is the number n * K + k of an expert of a token.

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences           T positions               D model width
    E experts             K experts per token       G hidden width of an expert
    I hidden width of all shared experts            Z gate and up side by side, 2 G
    J capacity slots of an expert for the tokens of one rank
    n tokens of this rank, b * t                    s capacity slots of all experts, E * J
A value whose name starts with `partial_` is still to be reduced over ranks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import matrix
import utils
from utils import EXPERT_AXES
from weights import RESIDUAL_SCALE, matmul, normal, vary, varying, weight, zeros

# --- weights --------------------------------------------------------------------------------------


LAYOUT = "E D/fsdp G/tensor | E/fsdp+tensor D G"  # without and with expert parallelism
DOWN_LAYOUT = "E G/tensor D/fsdp | E/fsdp+tensor G D"
BIAS_LAYOUT = "E G/tensor | E/fsdp+tensor G"


@flax.struct.dataclass
class Experts:
    """Routed experts.

    Under expert parallelism each is complete on one rank of EXPERT_AXES. Otherwise they are
    sharded like other weights, over fsdp and tensor, and gathered before use.
    """

    expert_parallel: bool = flax.struct.field(pytree_node=False)
    gate: jax.Array = weight(LAYOUT, normal("D"), matrix="D x G", active=("K", "E"))
    up: jax.Array = weight(LAYOUT, normal("D"), matrix="D x G", active=("K", "E"))
    down: jax.Array = weight(
        DOWN_LAYOUT, normal("G", RESIDUAL_SCALE), matrix="G x D", active=("K", "E")
    )
    gate_bias: jax.Array | None = weight(BIAS_LAYOUT, zeros, decay=False, active=("K", "E"))
    up_bias: jax.Array | None = weight(BIAS_LAYOUT, zeros, decay=False, active=("K", "E"))

    def inputs(self) -> tuple[Any, Any]:
        """Return the matrices of gate and up, with their biases."""
        if self.gate_bias is None:
            return self.gate, self.up
        return matrix.Biased(self.gate, self.gate_bias), matrix.Biased(self.up, self.up_bias)


@flax.struct.dataclass
class SharedExperts:
    """The shared experts of all tokens, as one gated network of their summed width I."""

    gate: jax.Array = weight("D/fsdp I/tensor", normal("D"), matrix="D x I")
    up: jax.Array = weight("D/fsdp I/tensor", normal("D"), matrix="D x I")
    down: jax.Array = weight("I/tensor D/fsdp", normal("I", RESIDUAL_SCALE), matrix="I x D")


def uses_expert_parallelism(config: utils.Config) -> bool:
    """Whether each expert lives on one rank of EXPERT_AXES, and is not sharded itself."""
    if config.model.experts_layout == "auto":
        ranks = math.prod(getattr(config.mesh, axis) for axis in EXPERT_AXES)
        return config.model.n_routed_experts % ranks == 0
    return config.model.experts_layout == "expert_parallel"


class Activation(NamedTuple):
    """What gate and up become in a gated feed-forward network (arXiv:2002.05202, equation 6)."""

    name: str = "silu"  # as model.hidden_act
    limit: float = 0.0  # as model.swiglu_limit

    @classmethod
    def of(cls, m: utils.Model) -> "Activation":
        return cls(m.hidden_act, m.swiglu_limit)

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.limit:  # of gpt-oss; the factor is that of GELU (arXiv:1606.08415, section 2)
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        return (jax.nn.silu(gate) if self.name == "silu" else jax.nn.gelu(gate)) * up


def concatenate_gate_up(w: Experts, dtype: jnp.dtype) -> Any:
    """Return [e, D, 2G]. One product reads its input once, as its gradient does.

    It is a copy, which pays off where an expert has more than about 4 G rows.
    """
    return matrix.side_by_side(*w.inputs(), dtype)


# --- within a capacity ----------------------------------------------------------------------------


def capacity_experts(
    w: Experts, h_btD: jax.Array, choices: Sequence[jax.Array], m: utils.Model, factor: float
) -> tuple[jax.Array, jax.Array]:
    """Sum weight * expert(h) over each token's choices within the capacity of their experts.

    choices      choice_btK and weight_btK.
    Returns      the sum [b, t, D], and the number of choices that are dropped.
    Collectives  those of run_slots.
    """
    (b, t, D), E = h_btD.shape, m.n_routed_experts
    choice_btK, weight_btK = choices
    J = expert_capacity(m, b * t, factor)
    slot_nK, choice_s = assign_slots(choice_btK, E, J)
    dropped = slot_nK.size - (slot_nK < E * J).sum(dtype=jnp.int32)
    buffer_sD = take_rows(h_btD.reshape(b * t, D), choice_s // m.num_experts_per_tok, slot_nK)
    # Weights travel with the tokens and multiply the hidden values. The gradient of a weight then
    # does not need the output of the expert.
    weight_s = take_rows(weight_btK.reshape(-1), choice_s, slot_nK.reshape(-1, 1))
    slots = buffer_sD.reshape(E, J, D), weight_s.reshape(E, J)
    y_EJD = run_slots(w, *slots, Activation.of(m))
    y_nD = add_rows(y_EJD.reshape(-1, D), slot_nK, choice_s // m.num_experts_per_tok)
    return y_nD.reshape(b, t, D), dropped


def expert_capacity(m: utils.Model, tokens: int, factor: float) -> int:
    """Return J = ceil(factor * K * tokens / E), at most `tokens`.

    tokens  of one rank in one microbatch. With expert parallelism an expert has J slots for each
            rank that sends to it.
    """
    return min(tokens, math.ceil(factor * m.num_experts_per_tok * tokens / m.n_routed_experts))


def assign_slots(choice_btK: jax.Array, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Assign each choice a capacity slot of its expert, by position and then sequence.

    No later token displaces an earlier one. A stable sort and two scatters of integers:
    O(n K log n K).

    choice_btK  indices of experts.
    Returns     slot_nK, e * capacity + the place at expert e, or experts * capacity for a dropped
                choice; choice_s [experts * capacity], the choice (n * K + k) in each slot, or
                n * K for an empty one.
    """
    b, t, K = choice_btK.shape
    by_position = choice_btK.swapaxes(0, 1).reshape(-1)
    order = jnp.argsort(by_position, stable=True)
    expert = by_position[order]
    numbers = jnp.arange(experts, dtype=expert.dtype)
    # Bisection would be thousands of tiny kernels on a GPU.
    start = jnp.searchsorted(expert, numbers, method="compare_all").astype(jnp.int32)
    place = jnp.arange(expert.size, dtype=jnp.int32) - start[expert]
    slot = jnp.where(place < capacity, expert * capacity + place, experts * capacity)
    slot_tbK = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True).reshape(t, b, K)
    slot_nK = slot_tbK.swapaxes(0, 1).reshape(b * t, K)
    numbers = jnp.arange(b * t * K, dtype=jnp.int32)
    empty = vary(jnp.full(experts * capacity, b * t * K, jnp.int32), varying(slot))
    return slot_nK, empty.at[slot_nK.reshape(-1)].set(numbers, mode="drop")


def run_slots(
    w: Experts, buffer_EJD: jax.Array, weight_EJ: jax.Array, act: Activation
) -> jax.Array:
    """Run each capacity slot through its expert, times its routing weight.

    Collectives  with expert parallelism all_to_all(EXPERT_AXES) of the dispatch buffer, there and
                 back, and of routing weights, so that an expert has J slots of each rank; else
                 all_gather(tensor) of both, and psum_scatter(tensor) of partial sums.
    """
    if w.expert_parallel:
        exchange = partial(lax.all_to_all, axis_name=EXPERT_AXES, tiled=True)
        send = partial(exchange, split_axis=0, concat_axis=1)
        send_back = partial(exchange, split_axis=1, concat_axis=0)
    else:
        send = partial(lax.all_gather, axis_name="tensor", axis=1, tiled=True)
        send_back = partial(lax.psum_scatter, axis_name="tensor", scatter_dimension=1, tiled=True)
    with jax.named_scope("dispatch"):
        buffer_eJD, weight_eJ = send(buffer_EJD), send(weight_EJ)
    slots = checkpoint_name((buffer_eJD, weight_eJ), "expert_in")
    matrices = concatenate_gate_up(w, buffer_eJD.dtype), w.down
    y_eJD = run_expert(slot_product, act, *matrices, *slots)
    with jax.named_scope("return"):
        return send_back(y_eJD)


def read_rows(x: jax.Array, index: jax.Array, **options: Any) -> jax.Array:
    """x[index], with zeros where `index` is past the end."""
    return x.at[index].get(mode="fill", fill_value=0, **options)


def sum_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Sum over j of x[index[:, j]]."""
    return read_rows(x, index).sum(1)


def with_transpose(function: Callable, transpose: Callable) -> Callable:
    """Return (x, index, back) -> function(x, index), with the gradient transpose(grad, back).

    So both directions can be gathers. A scatter runs one row after the other on a CPU.
    """
    run = jax.custom_vjp(lambda x, index, back: function(x, index))
    run.defvjp(
        lambda x, index, back: (function(x, index), back),
        lambda back, grad: (transpose(grad, back), None, None),
    )
    return run


# back  [rows of x, any]: where each row is in the result; past the end for nowhere.
take_rows = with_transpose(read_rows, sum_rows)
# back  [rows of x]: the row of the result that each row is added to.
add_rows = with_transpose(sum_rows, read_rows)


@jax.named_scope("experts")
def run_expert(product: Callable, act: Activation, *inputs: jax.Array) -> jax.Array:
    """Run rows x [..., D] through their experts; a partial sum if this rank has a part of G.

    product  multiplies each row with the matrix of its expert.
    inputs   gate_up_eDZ, down_eGD, x and the weights of its rows.
    """
    gate_up_eDZ, down_eGD, x, weight = inputs
    both = checkpoint_name(product(x, gate_up_eDZ), "expert_hidden")
    return product(weighted_hidden(act, both, weight), down_eGD)


slot_product = partial(matmul, "eJD,eDZ->eJZ")


def weighted_hidden(act: Activation, both: jax.Array, weight: jax.Array) -> jax.Array:
    """weight * act(gate, up), where `both` is [..., Z]."""
    hidden = act(*jnp.split(both, 2, axis=-1))
    # float32, for the sum over G in the gradient of a weight.
    return (hidden.astype(jnp.float32) * weight[..., None]).astype(hidden.dtype)
