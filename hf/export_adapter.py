"""Export of a run's adapters to a folder that PEFT opens on the base's model.

PEFT stores A as [r, inputs] and B as [outputs, r], under the name of the adapted matrix.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hf import model_config, safetensors_files, tensors
from hf.export_checkpoint import write_json
from utils import Config, ConfigError

PREFIX, FILE = "base_model.model.", "adapter_model.safetensors"


def write_folder(out: Path, config: Config, dtype: str, arrays: Mapping[str, Any]) -> list[str]:
    """Write adapter_model.safetensors and adapter_config.json; return the adapted modules.

    config  of the run, with [lora] as trained
    arrays  of its checkpoint (checkpoint.StoredArray), by name
    Raises  ConfigError for a run without adapters, or those of experts
    """
    if not config.lora.rank:
        raise ConfigError("--adapter: the run has no adapters (--lora.rank 0). Omit --adapter.")
    if "experts" in config.lora.targets:
        raise ConfigError(
            "--adapter: PEFT has no adapters of single experts (--lora.targets experts). Omit "
            "--adapter to export the merged model."
        )
    mappings = tensors.weight_mappings(config, model_config.kind_of(config.model))
    values = {}
    for mapping in mappings:
        # The rows of A are those of the matrix, and B has its columns.
        sides = {"A": mapping._replace(rotary=0), "B": mapping._replace(input_dims=1)}
        for side, layout in sides.items():
            array = arrays.get(f"weights.{mapping.name}.{side.lower()}")
            for index, w in array.parts(mapping.stack_dims) if array else ():
                name = PREFIX + mapping.tensor_names[index].removesuffix("weight")
                values[f"{name}lora_{side}.weight"] = layout.to_hf(w)
    shapes = [(name, np.dtype(getattr(jnp, dtype)), w.shape) for name, w in values.items()]
    files = safetensors_files.make_folder(out, shapes, sum(w.nbytes for w in values.values()))
    for name, w in values.items():
        files[name].write(w.astype(files[name].dtype))
    (out / safetensors_files.SINGLE).rename(out / FILE)
    modules = sorted({name.split(".")[-3] for name in values})
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": modules,
        "base_model_name_or_path": config.run.init_from,
        "inference_mode": True,
    }
    write_json(out / "adapter_config.json", table)
    return modules
