"""Compare configs/tiny.toml on one CPU device and on eight; compile time against size.

    ./run.sh python benchmark.py mesh

Compiled FLOPs are those of the matrix products in the compiled program, with loops counted as often
as they run. Model FLOPs are those of a program without waste and without its optimizer.
"""

from benchmarks.common import ONE_DEVICE, ROOT, compile_step, no_flags, step_seconds, with_values
from runtime import cli


def main(arguments: list[str]) -> None:
    no_flags(arguments, __doc__)
    # AdamW has no matrix products, which would count as waste.
    eight = with_values(
        cli.load(ROOT / "configs" / "tiny.toml"),
        mesh={"fsdp": 2, "pipeline": 2, "tensor": 2},
        model={"compute_dtype": "float32"},
        optimizer={"name": "adamw"},
    )
    one = with_values(eight, mesh=ONE_DEVICE)
    programs = [compile_step(one), compile_step(eight)]
    seconds = step_seconds(programs)
    for program, s in zip(programs, seconds, strict=True):
        print(
            f"mesh {program.config.mesh}: "
            f"{program.tokens / s:,.0f} tokens/s, compiled in {program.compile_s:.1f} s, "
            f"compiled over model FLOPs {program.flops_ratio():.3f}"
        )
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
