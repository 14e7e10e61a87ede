"""Time a step of any config on the devices of this machine.

    ./run.sh python benchmark.py step --config configs/tiny.toml

The flags are those of main.py.
"""

import jax

import depth
import fit
import hardware
import memory
import utils
import weights
from benchmarks.common import STEPS, compile_step, step_seconds
from dataset import with_vocabulary


def main(arguments: list[str]) -> None:
    config = with_vocabulary(depth.parse_open(arguments))
    program = compile_step(fit.for_devices(config, jax.devices())[0])
    config, declared = program.config, program.declared
    [seconds] = step_seconds([program])
    devices, kind = program.mesh.size, program.mesh.devices.flat[0].device_kind
    rate, chip = program.tokens / seconds, hardware.chip_of_kind(kind)
    per_token = hardware.palm_flops_per_token(config.model, declared, config.train.seq_len)
    achieved = rate * per_token / devices
    mfu = f"unknown: hardware.py has no peak for {kind!r}"
    if chip:
        peak = chip.peak(config.model.compute_dtype)
        mfu = f"{achieved / peak:.1%} of {peak / 1e12:.0f} TFLOP/s"
    size, source = memory.peak_bytes(program.mesh, program.step)
    total, active = weights.count(declared)
    print(f"{total:,} parameters, {active:,} active, on {devices} x {kind}")
    print(f"compile        {program.compile_s:.1f} s")
    print(f"step           {seconds:.4f} s (median of {STEPS})")
    print(f"tokens/s       {rate:,.0f}")
    print(f"per device     {achieved / 1e12:.3f} TFLOP/s")
    print(f"MFU            {mfu}")
    print(f"memory/device  {size / utils.GIB:.2f} GiB ({source})")
    print(hardware.MFU_RULE)
