"""What to change about a run that does not fit in memory."""

import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

import hardware
import memory
import sharded_model
import utils
from planning import cost
from runtime import cli
from utils import GIB, Config, ConfigError

LESS = 0.9  # share of the planned memory that may fit where the planned memory was too much


def settings(config: Config, mesh: Mesh, name: str, needed: float, usable: float) -> str:
    """Return a sentence with the two cheapest settings with which a program would fit by the plan.

    name    of the program, as memory.STEP
    needed  bytes that it needs, or 0; the plan's are scaled to that
    usable  bytes that a device has, or 0
    """
    if name == memory.SAMPLING:
        return "Use a smaller --sample.tokens, or no samples: --sample.prompts without a text."
    chip = hardware.chip_of_kind(mesh.local_devices[0].device_kind)
    platform = sharded_model.platform(mesh)

    def predict(config: Config) -> tuple[float, float, float]:
        """Return (bytes of the program, of the step, seconds or FLOPs of the step)."""
        p = cost.predict(config, chip, platform)
        step = float(p.memory_bytes_per_chip)
        size = p.evaluation_bytes if name == memory.EVALUATION else step
        return size, step, p.step_s or p.flops_per_chip

    now, _, usual = predict(config)
    scale = needed / now if needed else 1.0
    limit = usable if needed and usable else min(usable or math.inf, LESS * (needed or now))
    found = []
    for values in changes(config, name):
        try:
            cli.check(one := utils.changed(config, values))
            size, step, time = predict(one)
        except ConfigError:
            continue
        if scale * size <= limit and step <= (usable or math.inf):
            found.append((time, scale * size, values))
    if not found:
        return "By the plan no other setting fits: use more devices, a smaller model or seq_len."
    found.sort(key=lambda one: one[:2])
    others = [one for one in found if one[2].keys() != found[0][2].keys()]  # of other settings
    fits = []
    for time, size, values in [found[0], *others[:1]]:
        flags = " ".join(f"--{name} {value}" for name, value in values.items())
        fits.append(f"{flags} ({size / GIB:.3g} GiB, {time / usual:.2f} of the step time)")
    return f"By the plan these fit: {' or '.join(fits)}."


def changes(config: Config, name: str) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that save memory."""
    sequences = config.train.global_batch_size // config.mesh.batch
    counts = [n for n in hardware.divisors(sequences) if n > config.train.microbatches]
    for count in counts:
        yield {"train.microbatches": count}
    if name == memory.EVALUATION:
        return
    names = utils.REMAT_NAMES
    policies = [",".join(names[:2]), names[0], "full"] if config.train.remat == "none" else ["full"]
    if config.pipeline.split_backward:
        yield {"pipeline.split_backward": False}
    for policy in policies:
        yield {"train.remat": policy}
    sharded = config.mesh.fsdp * config.mesh.context > 1
    by_layer = {"fsdp.gather": "layer"} if sharded and config.fsdp.gather == "step" else {}
    if by_layer:
        yield by_layer
    everything = {"train.remat": "full", **by_layer}
    for count in counts:
        yield {"train.microbatches": count, **everything}
