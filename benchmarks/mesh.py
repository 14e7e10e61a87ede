"""Compare configs/tiny.toml on one CPU device and on eight; compile time against size.

    ./run.sh python benchmark.py mesh

Compiled FLOPs are those of the matrix products in the compiled program, with loops counted as often
as they run. Model FLOPs are those of a program without waste and without its optimizer.
"""

from benchmarks.common import (
    ONE_DEVICE,
    ROOT,
    NoFlags,
    compile_step,
    parse_flags,
    print_steps,
    with_values,
)
from runtime import cli


def main(arguments: list[str]) -> None:
    parse_flags(NoFlags, arguments, __doc__)
    # AdamW has no matrix products, which would count as waste.
    eight = with_values(
        cli.load(ROOT / "configs" / "tiny.toml"),
        mesh={"fsdp": 2, "pipeline": 2, "tensor": 2},
        model={"compute_dtype": "float32"},
        optimizer={"name": "adamw"},
    )
    one = with_values(eight, mesh=ONE_DEVICE)
    seconds = print_steps({"1 device": compile_step(one), "8 devices": compile_step(eight)})
    print(f"tokens/s of 8 devices over 1: {seconds[0] / seconds[1]:.2f}")
    for remat in ("none", "full"):
        dense = with_values(one, model={"n_routed_experts": 0}, train={"remat": remat})
        ratio = compile_step(dense).flops_ratio()
        print(f"dense, no pipeline, remat {remat}: compiled over model FLOPs {ratio:.3f}")
    print("compile seconds on mesh (2, 2, 2):")
    for layers, microbatches in ((8, 4), (32, 4), (8, 16), (32, 16)):
        evaluated = {"sequences": 2 * microbatches}
        trained = {"global_batch_size": 2 * microbatches, "microbatches": microbatches}
        sized = with_values(
            eight, model={"num_hidden_layers": layers}, train=trained, eval=evaluated
        )
        seconds = compile_step(sized).compile_s
        print(f"  {layers:2} layers, {microbatches:2} microbatches: {seconds:.1f}")
