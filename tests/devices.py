"""Stand-ins for devices that are not here."""

from types import SimpleNamespace


class Device(SimpleNamespace):
    __hash__ = object.__hash__


def chips(platform, count, slices=1, kind="host"):
    """Devices with the attributes that placement on a mesh reads, four on a host; TPUs are on a
    torus of width 4. XLA numbers the hosts of CPUs and GPUs in `slice_index`.
    """
    tpu = platform == "tpu"
    return [
        Device(
            platform=platform,
            device_kind="TPU v4" if tpu else kind,
            id=i,
            process_index=i // 4,
            slice_index=i * slices // count if tpu else i // 4,
            core_on_chip=0,
            coords=(i % 4, i // 4 % (4 // slices), i // 16),
        )
        for i in range(count)
    ]
