"""Make the tables of the guide, as HTML, from plans and declarations."""

import html
import math
from collections import Counter
from collections.abc import Sequence

import answers
from answers import GIB, plan
from pages import PageError


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML. The cells are text."""

    def line(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(titles, 'th')}</thead><tbody>{body}</tbody></table>"


def layout(dims: Sequence[str], dim_axes: Sequence[Sequence[str]]) -> str:
    """Return dimensions with the mesh axes that they are sharded over, as in `V/tensor D`.

    As in a declaration, fsdp stands for fsdp and context.
    """
    shown = [[axis for axis in axes if axis != "context"] for axes in dim_axes]
    named = zip(dims, shown, strict=True)
    return " ".join(f"{dim}/{'+'.join(axes)}" if axes else dim for dim, axes in named)


def table_layouts() -> str:
    """Return the layout of the weights of one dense layer of the 1B model on (8, 2, 2)."""
    dims = {
        "attention.query.down": "D Q", "attention.query.up": "Q N A", "attention.norm": "D",
        "attention.kv_down": "D C+R", "attention.kv_up": "C N H+W", "attention.out": "N W D",
        "mlp.norm": "D", "mlp.gate": "D F", "mlp.down": "F D",
    }  # fmt: skip
    rows = []
    for name, letters in dims.items():
        weight, slices = answers.weight_of_1b(f"blocks.dense.{name}")
        own = letters.split()
        shape, slices = weight.shape[-len(own) :], slices[-len(own) :]
        cells = (" x ".join(map(str, shape)), " x ".join(map(str, slices)))
        size = f"{4 * math.prod(slices) / 1024:,.1f} KiB"
        rows.append((name, layout(own, weight.dim_axes[-len(own) :]), *cells, size))
    return table(("weight", "layout", "shape", "slice of a device", "float32"), rows)


def table_memory() -> str:
    """Return the predicted memory of a device for the 1B model on (8, 2, 2), by its parts."""
    meanings = {
        "saved activations": "values of the forward pass that the backward pass needs",
        "one layer": "what the backward pass of one layer computes and needs at a time",
        "gradients": "float32 sums, of the gathered weights",
        "optimizer state": "two float32 averages of each stored slice",
        "weights in use": "gathered bfloat16 weights",
        "weights": "float32 slices",
        "gaps": "space that the allocator cannot use",
        "pipeline buffers": "activations between stages",
    }
    parts = Counter({name: size for name, size in plan().memory.items() if size >= 2**20})
    if parts.keys() != meanings.keys():
        raise PageError(f"the plan's parts of memory are now {sorted(parts)}")
    rows = [(name, meanings[name], f"{size / GIB:.2f} GiB") for name, size in parts.most_common()]
    return table(("part", "what it is", "predicted"), rows)


def table_layer_costs() -> str:
    """Return parameters and FLOPs of each part of a dense layer of the 1B model."""
    costs = answers.layer_costs("jaxformer_1b", answers.config_of("jaxformer_1b").train.seq_len)
    rows = [(part, f"{size:,}", f"{flops / 1e6:,.2f} M") for part, size, flops in costs if flops]
    norms = sum(size for _, size, flops in costs if not flops)
    parameters, total = (sum(cost[i] for cost in costs) for i in (1, 2))
    rows += [("norms", f"{norms:,}", ""), ("all", f"{parameters:,}", f"{total / 1e6:,.2f} M")]
    return table(("part", "parameters", "FLOPs forward"), rows)


def table_plan_seconds() -> str:
    """Return the predicted busy seconds of a step of the 1B model on (8, 2, 2)."""
    meanings = {
        "compute": "operations",
        "memory": "bytes through memory",
        "fsdp": "gathers of weights, reductions of gradients",
        "tensor": "activations of each layer",
        "fsdp+tensor": "tokens to their experts and back",
        "pipeline": "activations between stages",
    }
    rows = [
        (name, meanings.get(name, "embedding and loss"), f"{1e3 * seconds:.1f} ms")
        for name, seconds in Counter(plan().seconds).most_common()
    ]
    return table(("busy", "with what", "predicted"), rows)


def table_links() -> str:
    """Return the time of links over that of operations, by the inequalities and by the planner."""
    rows = []
    for machine, shown, axis, mesh in (
        ("v4", "64 TPU v4", "fsdp", (64, 1, 1)),
        ("v4", "64 TPU v4", "tensor", (16, 1, 4)),
        ("v5e", "16 TPU v5e", "fsdp", (16, 1, 1)),
        ("h100", "8 H100", "tensor", (1, 1, 8)),
        ("h100", "8 H100", "pipeline", (2, 4, 1)),
        ("h100s", "64 H100", "pipeline", (1, 8, 8)),
        ("pcs", "two PCs", "fsdp", (2, 1, 1)),
        ("pcs", "two PCs", "pipeline", (1, 2, 1)),
    ):
        ratios = answers.links_over_compute(machine, axis, mesh)
        rows.append((shown, str(mesh), axis, *(f"{ratio:.2f}" for ratio in ratios)))
    return table(("machine", "mesh", "links of", "by the inequality", "by the planner"), rows)


def table_hf_names() -> str:
    """Return the tensors of one layer with experts of the 1B model."""
    rows = []
    for name, mapping in answers.hf_mappings("jaxformer_1b").items():
        if name.startswith("blocks.moe."):
            theirs = next(iter(mapping.tensor_names.values()))
            shape = " x ".join(map(str, mapping.hf_shape))
            rows.append((name.removeprefix("blocks.moe."), theirs, shape))
    return table(("here", "there, the first of its kind", "shape there"), rows)


def table_example() -> str:
    """Return the sizes with which chapters calculate, those of the 1B model on (8, 2, 2)."""
    config = answers.config_of("jaxformer_1b", 8, 2, 2)
    m, mesh, train = config.model, config.mesh, config.train
    alike = {
        "F, G": {m.intermediate_size, m.moe_intermediate_size},
        "Q, C, R": {m.q_lora_rank, m.kv_lora_rank, m.qk_rope_head_dim},
    }
    if different := [letters for letters, sizes in alike.items() if len(sizes) > 1]:
        raise PageError(f"{different[0]} of the example differ now. Show them apart.")
    sequences = train.global_batch_size // (mesh.batch * train.microbatches)
    parts = {
        "Example": config.run.name,
        "layers": f"{m.num_hidden_layers}, every {m.decoder_sparse_step}th with experts",
        "D": m.hidden_size,
        "F, G": f"{m.intermediate_size:,}",
        "N": f"{m.num_attention_heads} heads",
        "A, W": "{}, {}".format(*answers.attention.kind_of(m).widths(m)),
        "Q, C, R": m.q_lora_rank,
        "E": f"{m.n_routed_experts} experts",
        "K": f"{m.num_experts_per_tok} of them for a token",
        "mesh": f"({mesh.fsdp}, {mesh.pipeline}, {mesh.tensor})",
        "microbatches": f"{train.microbatches}, of {sequences} x {train.seq_len:,} tokens a device",
    }
    shown = "".join(f"<span><b>{name}</b> {value}</span>" for name, value in parts.items())
    return f'<div class="example">{shown}</div>'


TABLES = {
    "example": table_example,
    "layouts": table_layouts,
    "memory": table_memory,
    "layer-costs": table_layer_costs,
    "plan-seconds": table_plan_seconds,
    "links": table_links,
    "hf-names": table_hf_names,
}
