"""Export of a checkpoint to a folder that Hugging Face transformers opens."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import model
import weights
from data.hf_tokenizer import read_settings
from data.progress import progress
from data.tokenizer import text_tokens
from hf import model_config, safetensors_files, tensors
from hf.families import FAMILIES, OWN
from hf.tokenizer_export import write_hugging_face
from runtime import cli, jsonl, run_directory
from utils import GIB, Config, ConfigError

FILE_BYTES = 4 * GIB  # of each file, at most
MODELING_FILE = Path(__file__).with_name("modeling_latent_moe.py")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A transformer with {attention} attention{experts}: {parameters:,} parameters, of which a token
uses {active:,}. {trained} The weights are {dtype}.

```python
from transformers import pipeline

generate = pipeline("text-generation", {arguments})
print(generate({prompt}, max_new_tokens=64)[0]["generated_text"])
```

No token is dropped by an expert here; training may drop tokens beyond an expert's capacity.

## The run

```toml
{toml}```
"""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a checkpoint to a folder that transformers opens."""

    run: str  # directory of the run, for example runs/tiny or gs://bucket/runs/tiny
    out: Path  # folder to write, new or empty
    step: int | None = None  # step of a kept checkpoint; default: the newest valid one
    # export the modelling file too, for models that the classes of transformers do not support;
    # the folder then needs trust_remote_code=True
    remote_code: bool = False
    # the adapters alone, in PEFT's format, instead of the merged model
    adapter: bool = False
    # of the weights; float32 is exact
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def arguments(self) -> str:
        """Arguments of from_pretrained that load the folder."""
        return repr(str(self.out)) + ", trust_remote_code=True" * self.remote_code


def write_folder(
    flags: Export,
    run: run_directory.RunDirectory,
    config: Config,
    step: int,
    tokens: dict[str, Any],
    arrays: Mapping[str, Any],
) -> str:
    """Write the folder, and return the class of transformers that opens it.

    config.json is written last, because a folder without it does not open.
    tokens  the tokenizer of the run, as in the checkpoint's config.
    arrays  of the checkpoint (checkpoint.StoredArray), by name.
    """
    kind = OWN if flags.remote_code else model_config.kind_of(config.model)
    hf_class = FAMILIES[kind].hf_class
    if reasons := model_config.unsupported(config.model, kind):
        fix = "--remote_code, which exports a modelling file too"
        if model_config.unsupported(config.model, OWN):
            fix = "generate.py and validate.py, which do"
        raise ConfigError(
            f"--run {flags.run} has {'; '.join(reasons)}, which {hf_class} does not support. Use "
            f"{fix}."
        )
    tokenizer, end_of_text = None, tokens["end_of_text"]
    if tokens.get("tokenizer") != "":  # of an imported run without one
        tokenizer, _, ends = text_tokens(tokens, run)
        end_of_text = ends if len(ends) > 1 else ends[0]
    mappings = tensors.weight_mappings(config, kind)
    _check_arrays(run, mappings, arrays, kind)
    dtype = np.dtype(getattr(jnp, flags.dtype))
    shapes = tensors.tensor_shapes(mappings, config.model, kind, dtype)
    _write_weights(flags.out, mappings, shapes, arrays)
    if kind == OWN:
        shutil.copy(MODELING_FILE, flags.out)
    hf = run.folder(run_directory.HF)  # of the imported base that the run was started from
    base, generation = (read_settings(hf / n) for n in ("config.json", "generation_config.json"))
    table = model_config.to_hf(config, kind, flags.dtype, end_of_text)
    table = model_config.with_base(table, base, config.train.seq_len)
    is_chat = False
    if tokenizer:
        length, template = table["max_position_embeddings"], tokens.get("chat_template")
        is_chat = write_hugging_face(tokenizer, flags.out, length, template)
    card = model_card(flags, run, config, step, is_chat)
    (flags.out / "README.md").write_text(card, encoding="utf-8")
    if base:
        ids = ("bos_token_id", "pad_token_id")
        generation = {n: table[n] for n in ids if table[n] is not None} | generation
    else:
        generation = {"pad_token_id": tokens["end_of_text"], "do_sample": True}
    generation["eos_token_id"] = end_of_text
    write_json(flags.out / "generation_config.json", generation)
    write_json(flags.out / "config.json", table)
    return hf_class


def _write_weights(
    folder: Path,
    mappings: list[tensors.WeightMapping],
    shapes: list[tensors.TensorShape],
    arrays: Mapping[str, Any],
) -> None:
    files = safetensors_files.make_folder(folder, shapes, FILE_BYTES)
    tied = all(mapping.name != "last.output" for mapping in mappings)
    with progress(sum(mapping.size * 4 for mapping in mappings)) as bar:
        for mapping in mappings:
            for index, w in arrays[f"weights.{mapping.name}"].parts(mapping.stack_dims):
                names = [mapping.tensor_names.get(index)]
                if mapping.name == "first.embedding" and tied:
                    names.append(tensors.OUTSIDE_LAYERS["last.output"])
                for name in filter(files.get, names):
                    values = mapping.to_hf(w).astype(files[name].dtype)
                    files[name].write(values, mapping.columns)
                bar.update(w.nbytes)


def _check_arrays(
    run: run_directory.RunDirectory,
    mappings: list[tensors.WeightMapping],
    arrays: Mapping[str, Any],
    kind: str,
) -> None:
    """Raises ConfigError unless the arrays are those of the config, and the class has them."""
    for mapping in mappings:
        array = arrays.get(f"weights.{mapping.name}")
        shape = "absent" if array is None else array.shape
        if shape != mapping.shape:
            raise ConfigError(
                f"the checkpoint of {run} is of another model than its config.toml: {mapping.name} "
                f"is {shape} there and {mapping.shape} by the config. Restore its config.toml."
            )
        if not mapping.tensor_names and np.any(array.whole()):
            raise ConfigError(
                f"--run {run} has {mapping.name} that is not zero "
                f"(model.router_bias_update_speed), and {FAMILIES[kind].hf_class} has no such "
                "bias. Use --remote_code."
            )


def model_card(
    flags: Export, run: run_directory.RunDirectory, config: Config, step: int, is_chat: bool
) -> str:
    """Return the README of the exported folder: size, loss, how to load it, config."""
    parameters, active = weights.count(model.declare(tensors.on_one_device(config)))
    m, t, loss = config.model, config.train, ""
    trained = "These are imported weights, without further training."
    if step:
        trained = f"Trained for {step:,} steps of {t.global_batch_size * t.seq_len:,} tokens"
        trained += f", from the weights of {config.run.init_from}." if config.run.init_from else "."
    for record in jsonl.read(run.files / "metrics.jsonl"):
        if record.get("loss/val") is not None and record["step"] <= step:
            loss = f" The validation loss after {record['step']:,} steps was "
            loss += f"{record['loss/val']:.4f} nats per token."
    return CARD.format(
        name=run.name,
        attention="grouped-query" if m.attention == "gqa" else "multi-head latent",
        experts=f" and {m.n_routed_experts} experts" if m.moe_layers else "",
        parameters=parameters,
        active=active,
        trained=trained + loss,
        dtype=flags.dtype,
        arguments=flags.arguments,
        prompt=[{"role": "user", "content": "Hello!"}] if is_chat else repr("def "),
        toml=cli.to_toml(config),
    )


def write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
