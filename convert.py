"""Checkpoints to and from the folders of Hugging Face transformers.

    ./run.sh python convert.py export --run runs/tiny --out exported --remote_code
    ./run.sh python convert.py import --folder Moonlight-16B-A3B --out runs/moonlight

An exported folder opens with AutoModelForCausalLM.from_pretrained: as DeepseekV3ForCausalLM, or
DeepseekV2ForCausalLM where experts' scores are a softmax; with --remote_code by a modelling file
that is put beside the weights, which can say all that a model here can be. An imported folder is a
run without training, to sample, to validate, to export, and for main.py --init. Weights pass
through one after the other, in the memory of one, on the CPU: neither needs the devices that a
model was trained on.
"""

import dataclasses
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import faults
import hugging_face
import metrics
import model
import resume
import run_folder
import starts
import tensor_files
import utils
import weights
from checkpoint import Checkpoints
from data import hf_tokenizer
from data.tokenizer import begin_of_text, load_tokenizer, table_sha256
from hugging_face import OWN, V2, Found, Leaf
from hugging_face_tokenizer import write_hugging_face
from metrics import say
from tensor_files import Tensor
from utils import GIB, Config

MODELLING = Path(__file__).with_name("modeling_latent_moe.py")
Done = Callable[[int], None]  # tells of bytes
FIRST = 10  # names that an error lists
LINE_EVERY_S = 10.0
SCALES = "_scale_inv"  # end of the name of the scales of float8 numbers
LONGEST = 4096  # tokens of a text, of an imported run, unless more are asked for


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint as a folder that transformers opens."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    out: Path  # folder to write, new or empty
    step: int | None = None  # of a checkpoint that is still kept; the newest good one if not given
    # bring a modelling file for what the classes of transformers cannot say; the folder is then
    # opened with trust_remote_code=True
    remote_code: tyro.conf.FlagCreatePairsOff[bool] = False
    # of the weights; float32 keeps all bits
    dtype: Literal["float32", "bfloat16"] = "float32"
    part_gib: float = 4.0  # most GiB of a file


@dataclass(frozen=True, kw_only=True)
class Import:
    """Read a folder of transformers as a run. Takes main.py's flags for the run's config."""

    folder: Path  # with config.json and safetensors
    out: Path  # folder of the run to make, new or empty, as runs/NAME


def main(arguments: list[str] | None = None) -> None:
    commands = (
        Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Import, tyro.conf.subcommand("import")]
    )
    flags, rest = tyro.cli(
        commands,
        args=arguments,
        return_unknown_args=True,
        use_underscores=True,
        description=__doc__,
    )
    if isinstance(flags, Export):
        if rest:
            raise ValueError(f"unknown flag {rest[0]}. See convert.py export --help.")
        export_run(flags)
    else:
        import_folder(flags, rest)


# --- export ---------------------------------------------------------------------------------------


def export_run(flags: Export) -> None:
    """Raises ValueError for what transformers cannot say, and where nothing can be read or
    written.
    """
    run = run_folder.at(flags.run)
    config = resume.config_of(run, [], Export)
    kind = OWN if flags.remote_code else hugging_face.kind_of(config.model)
    obstacles = [] if flags.remote_code else hugging_face.obstacles(config.model)
    if obstacles:
        raise ValueError(
            f"--run {flags.run} has {'; '.join(obstacles)}: {hugging_face.CLASSES[kind]} has no "
            "word for that. Use --remote_code, which brings a modelling file."
        )
    if not 0 < flags.part_gib < math.inf:
        raise ValueError(f"--part_gib {flags.part_gib} is no size of a file. Use 4.")
    with closing(Checkpoints(run.checkpoints)) as saved, _filled(flags.out):
        step = saved.good_step(flags.step)
        told, arrays = saved.config(step), _weights(saved.arrays(step))
        tokenizer, end_of_text = _tokens(told["tokens"], config)
        leaves = hugging_face.leaves(config, kind)
        _must_agree(run, leaves, arrays)
        dtype = np.dtype(getattr(jnp, flags.dtype))
        shapes = hugging_face.shapes(leaves, config.model, kind, dtype)
        tensors = tensor_files.make_folder(flags.out, shapes, int(flags.part_gib * GIB))
        with _progress(sum(leaf.size * 4 for leaf in leaves)) as done:
            for leaf in leaves:
                _write(leaf, arrays[leaf.name], tensors, done)
        if kind == OWN:
            shutil.copy(MODELLING, flags.out)
        if tokenizer:
            write_hugging_face(tokenizer, flags.out, config.train.sequence_length)
        (flags.out / "README.md").write_text(card(flags, config, step, kind))
        generation = {"eos_token_id": end_of_text, "pad_token_id": end_of_text, "do_sample": True}
        _write_json(flags.out / "generation_config.json", generation)
        # Last: without it a folder opens nowhere.
        table = hugging_face.to_json(config, kind, flags.dtype, end_of_text)
        _write_json(flags.out / "config.json", table)
    say(f"step {step} of {flags.run} as {hugging_face.CLASSES[kind]}: {flags.out}")
    say(_how_to_open(flags, kind))


def _tokens(tokens: dict[str, Any], config: Config) -> tuple[Any, int | None]:
    """The tokenizer, where there is one, and the id that ends a text."""
    if tokens.get("tokenizer") == "":
        return None, tokens["end_of_text"]
    return resume.tokenizer_of(tokens, config)[:2]


def _weights(arrays: Mapping[str, Any]) -> dict[str, Any]:
    first = "weights."
    return {name.removeprefix(first): a for name, a in arrays.items() if name.startswith(first)}


def _must_agree(run: run_folder.Folder, leaves: list[Leaf], arrays: Mapping[str, Any]) -> None:
    for leaf in leaves:
        have = arrays[leaf.name].shape if leaf.name in arrays else "absent"
        if have != leaf.shape:
            raise ValueError(
                f"the checkpoint of {run} is of another model than its config.toml: {leaf.name} is "
                f"{have} there and {leaf.shape} by the config."
            )
        if not leaf.names and np.any(arrays[leaf.name].read().result()):
            raise ValueError(
                f"--run {run} has {leaf.name} that is not zero (model.router_bias_speed), and "
                f"{hugging_face.CLASSES[V2]} chooses experts without one. Use --remote_code."
            )


def _write(leaf: Leaf, array: Any, tensors: Mapping[str, Tensor], done: Done) -> None:
    """All tensors of an array, a chunk of its stack at a time: no less can be read."""
    stack, sizes = leaf.shape[: leaf.stacked], array.chunk_layout.read_chunk.shape
    starts = [range(0, n, size) for n, size in zip(stack, sizes, strict=False)]
    for start in itertools.product(*starts):
        chunk = tuple(slice(at, at + n) for at, n in zip(start, sizes, strict=False))
        piece = array[(*chunk, ...)].read().result()
        for index in np.ndindex(piece.shape[: leaf.stacked]):
            name = leaf.names.get(tuple(map(sum, zip(start, index, strict=True))))
            if name:
                tensor = tensors[name]
                tensor.write(leaf.to_theirs(piece[index]).astype(tensor.dtype))
        done(piece.nbytes)


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A transformer with multi-head latent attention{experts}: {whole:,} parameters, of which a token uses
{active:,}. {trained} Weights are {dtype}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{how}
tokenizer = AutoTokenizer.from_pretrained({where})
ids = tokenizer("def ", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0]))
```

No token is dropped here for want of room at an expert, as it may be in training.

## Results

{results}
## The run

```toml
{toml}```
"""


def card(flags: Export, config: Config, step: int, kind: str) -> str:
    """The model card: what the model is, how it is opened, what it reached, and how."""
    whole, active = weights.count(model.declare(hugging_face.alone(config)))
    m, t = config.model, config.train
    run = run_folder.at(flags.run)
    file = run.files / "metrics.jsonl"
    records = metrics.read(file) if file.is_file() else []
    losses = [r for r in records if r.get("loss/val") is not None and r["step"] <= step]
    rows = [f"| {r['step']:,} | {r['loss/val']:.4f} |" for r in losses]
    head = ["| step | validation loss, nats per token |", "|---|---|"]
    trained = f"Trained for {step:,} steps of {t.sequences * t.sequence_length:,} tokens"
    trained += f", from the weights of {config.run.init}." if config.run.init else "."
    return CARD.format(
        name=run.name,
        experts=f" and {m.experts} experts" if m.moe_layers else "",
        whole=whole,
        active=active,
        trained=trained if step else "Not trained here: these are the weights that were imported.",
        dtype=flags.dtype,
        how=_how_to_open(flags, kind),
        where=_where(flags, kind),
        results="\n".join([*head, *rows, ""]) if rows else "Not validated.\n",
        toml=utils.to_toml(config),
    )


def _how_to_open(flags: Export, kind: str) -> str:
    return f"model = AutoModelForCausalLM.from_pretrained({_where(flags, kind)})"


def _where(flags: Export, kind: str) -> str:
    return repr(str(flags.out)) + (", trust_remote_code=True" if kind == OWN else "")


# --- import ---------------------------------------------------------------------------------------


def import_folder(flags: Import, rest: Sequence[str]) -> None:
    """Raises ValueError for a folder of another architecture, with other tensors than its config
    tells of, or damaged.
    """
    where = flags.folder / "config.json"
    if not where.is_file():
        raise ValueError(f"--folder {flags.folder} has no config.json. Give a model's folder.")
    table = hf_tokenizer.settings_of(where)
    found = hugging_face.from_json(table, where)
    config = _config(found, flags, rest)
    tensors = tensor_files.read_folder(flags.folder)
    leaves = hugging_face.leaves(config, found.kind, found.interleaved)
    _must_have(flags.folder, found, leaves, tensors)
    stacked = {f"weights.{leaf.name}": leaf.stacked for leaf in leaves}
    with (
        _filled(flags.out),
        tempfile.TemporaryDirectory(dir=flags.out, prefix="assembling-") as scratch,
        closing(Checkpoints(flags.out / "checkpoints", keep=1, stacked=stacked)) as made,
        _progress(sum(leaf.size * 4 for leaf in leaves)) as done,
    ):
        tokens = _tokenizer(flags, table.get("eos_token_id"))
        arrays = {}
        for leaf in leaves:
            file = Path(scratch, leaf.name)
            array = np.memmap(file, np.float32, "w+", shape=leaf.shape)  # zeros
            for index, name in leaf.names.items():
                array[index] = leaf.to_ours(_read(tensors, name, found.block))
                done(array[index].nbytes)
            array.flush()
            arrays[f"weights.{leaf.name}"] = np.memmap(file, np.float32, "r", shape=leaf.shape)
        made.made_by = starts.of_now(0)
        made.save(0, arrays, dataclasses.asdict(config) | {"tokens": tokens})
        made.must_have(0)
        # Last: without it the folder is no run.
        (flags.out / "config.toml").write_text(utils.to_toml(config))
    for line in _told(flags, found, tokens):
        say(line)


def _config(found: Found, flags: Import, rest: Sequence[str]) -> Config:
    """What main.py's flags say, over the model that was found and a mesh of one device.

    Raises  ValueError where they say another model.
    """
    T = str(min(found.length, LONGEST))
    small = ["--mesh.fsdp", "1", "--mesh.pipeline", "1", "--mesh.tensor", "1"]
    small += ["--train.sequences", "1", "--train.microbatches", "1", "--train.sequence_length", T]
    small += ["--run.name", flags.out.name, "--run.dir", str(flags.out.parent)]
    own = tuple(field.name for field in dataclasses.fields(Import))
    config = utils.parse([*small, *rest], own, model=found.model)
    resume.same_model(flags.folder, found.model, config.model, "--folder")
    return config


def _must_have(
    folder: Path, found: Found, leaves: list[Leaf], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ValueError unless the tensors are those of the model, in its shapes."""
    wanted = {name: leaf for leaf in leaves for name in leaf.names.values()}
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not _unused(name, found)]
    lacks = f"lacks {len(missing)} of {len(wanted)} tensors that its config tells of: "
    has = f"has {len(extra)} tensors that its config does not tell of: {_listed(extra)}. They are "
    has += "of another model than this config, or another layout of it."
    if missing:
        mend = f"It {has}" if extra else "Fetch the folder again."
        raise ValueError(f"{folder} {lacks}{_listed(missing)}. {mend}")
    if extra:
        raise ValueError(f"{folder} {has}")
    for name, leaf in wanted.items():
        if tensors[name].shape != leaf.shape_there:
            raise ValueError(
                f"{folder}: {name} is {tensors[name].shape}, and by the config "
                f"{leaf.shape_there}. They are of two models."
            )
        scales = tensors.get(f"{name}{SCALES}")
        have, needed = scales and scales.shape, _scales(tensors[name], found.block)
        if have != needed:
            raise ValueError(
                f"{folder}: {name}{SCALES} is {have or 'absent'}, and {tensors[name].dtype} in "
                f"blocks of {found.block} needs {needed or 'none'}: quantization_config says "
                "other numbers than these. Fetch the folder again."
            )


def _scales(tensor: Tensor, block: tuple[int, int] | None) -> tuple[int, ...] | None:
    """The shape of the scales of a tensor's blocks; None of a tensor that has none."""
    if tensor.dtype.itemsize > 1:
        return None
    return tuple(-(-n // size) for n, size in zip(tensor.shape, block or (), strict=False))


def _unused(name: str, found: Found) -> bool:
    """Whether nothing is lost without this tensor of a folder."""
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    ahead = range(found.model.layers, found.model.layers + found.skipped)
    return (
        name.endswith((SCALES, "rotary_emb.inv_freq"))  # the first is read with its weight
        or (found.model.tied and name == "lm_head.weight")
        or (layer.isdigit() and int(layer) in ahead)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:FIRST]) + (", ..." if len(names) > FIRST else "")


def _read(tensors: Mapping[str, Tensor], name: str, block: tuple[int, int] | None) -> np.ndarray:
    """A tensor in float32; float8 numbers are times the scale of their block."""
    w = tensors[name].read().astype(np.float32)
    scale = tensors.get(f"{name}{SCALES}")
    if scale is None:
        return w
    rows, columns = (np.arange(n) // size for n, size in zip(w.shape, block, strict=True))
    return w * scale.read().astype(np.float32)[rows[:, None], columns[None, :]]


def _tokenizer(flags: Import, end_of_text: Any) -> dict[str, Any]:
    """What a checkpoint says of its tokens; the files of the tokenizer are copied to the run."""
    if not (flags.folder / hf_tokenizer.TABLE).is_file():
        return {"tokenizer": "", "end_of_text": [*np.ravel(end_of_text).tolist(), None][0]}
    folder = flags.out / "tokenizer"
    folder.mkdir()
    for name in (hf_tokenizer.TABLE, hf_tokenizer.SETTINGS, *hf_tokenizer.MODEL_SETTINGS):
        if (flags.folder / name).is_file():
            shutil.copy(flags.folder / name, folder)
    tokenizer = load_tokenizer(str(folder))
    begin = begin_of_text(tokenizer, always=False)
    return {
        "tokenizer": str(folder),
        "tokenizer_sha256": table_sha256(tokenizer),
        "end_of_text": tokenizer.eot_token,
    } | ({} if begin is None else {"begin_of_text": [begin]})


def _told(flags: Import, found: Found, tokens: dict[str, Any]) -> list[str]:
    lines = [f"{flags.folder} is the run {flags.out}: {found.model.layers} layers"]
    if found.skipped:
        lines.append(
            f"left out: {found.skipped} layers that predict further tokens, after "
            f"layer {found.model.layers - 1}"
        )
    if not tokens["tokenizer"]:
        return [*lines, f"{flags.folder} has no tokenizer.json, so no text can be made with it"]
    return [*lines, f'./run.sh python generate.py --run {flags.out} --prompt "..."']


# --- both -----------------------------------------------------------------------------------------


@contextmanager
def _filled(folder: Path) -> Iterator[None]:
    """A new folder, or an empty one, as it was before if what fills it is stopped.

    Raises  ValueError where there is something, or nothing can be written.
    """
    is_new = not folder.exists()
    if not is_new and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {folder} is not empty, and nothing is written over. Give a new folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for entry in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if is_new and folder.is_dir():
            folder.rmdir()
        if isinstance(error, OSError):
            raise ValueError(f"--out {folder} was not written: {error}.") from error
        raise


@contextmanager
def _progress(total_bytes: int) -> Iterator[Done]:
    """What takes bytes as they are done: a bar in a terminal, or a line every LINE_EVERY_S."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    is_terminal = metrics.console.is_terminal
    done, next_line_s = 0, time.monotonic() + LINE_EVERY_S

    def add(count: int) -> None:
        nonlocal done, next_line_s
        done += count
        progress.update(task, completed=done)
        if not is_terminal and time.monotonic() > next_line_s:
            say(f"{done / GIB:.1f} of {total_bytes / GIB:.1f} GiB")
            next_line_s = time.monotonic() + LINE_EVERY_S

    console = metrics.console
    with Progress(*columns, console=console, transient=True, disable=not is_terminal) as progress:
        task = progress.add_task("", total=total_bytes)
        yield add


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    faults.command_line(main)
