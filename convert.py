"""Convert checkpoints to and from folders of Hugging Face transformers.

    ./run.sh python convert.py export --run runs/tiny --out exported --remote_code
    ./run.sh python convert.py import --folder Moonlight-16B-A3B --out runs/moonlight

AutoModelForCausalLM.from_pretrained opens an exported folder, by a class of hf/families.py or, with
--remote_code, by its own modelling file, for models that those classes do not support. An imported
folder is a run without training, for generate.py, validate.py, export, and main.py --run.init_from.
Conversion runs on the CPU with one tensor in memory at a time, on any machine.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import utils
from checkpoint import Checkpoints
from hf import export_adapter, export_checkpoint, import_checkpoint, safetensors_files, tensors
from hf.export_checkpoint import Export
from hf.model_config import HfModel
from runtime import cli, errors, provenance, resume, run_directory
from runtime.console import log
from utils import Config, ConfigError

MAX_SEQ_LEN = 4096  # of an imported run, unless --train.seq_len is given


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import a folder of transformers as a run. Flags of main.py override the run's config."""

    folder: Path  # with config.json and safetensors files
    out: Path  # directory of the new run, new or empty, for example runs/NAME


def main(arguments: list[str] | None = None) -> None:
    flags, rest = cli.parse_known(Export | Import, arguments, __doc__)
    if isinstance(flags, Import):
        import_folder(flags, rest)
    else:
        cli.refuse_unknown(rest, utils.settings_of(Export))
        export_run(flags)


def export_run(flags: Export) -> None:
    """Raises ConfigError for a model that transformers does not support, or a failed write."""
    run = run_directory.at(flags.run)
    config = resume.config_of(run, [], Export)
    with closing(Checkpoints(run.checkpoints)) as saved, _new_folder(flags.out):
        step = saved.step_or_newest(flags.step)
        stored, arrays = saved.record(step)["config"], saved.arrays(step)
        if flags.adapter:
            config = dataclasses.replace(config, lora=utils.Lora(**stored.get("lora", {})))
            modules = export_adapter.write_folder(flags.out, config, flags.dtype, arrays)
            log(f"step {step} of {flags.run}, adapters of {', '.join(modules)}: {flags.out}")
            log(f"model = PeftModel.from_pretrained(base, {str(flags.out)!r})")
            return
        tokens = stored["tokens"]
        name = export_checkpoint.write_folder(flags, run, config, step, tokens, arrays)
    log(f"step {step} of {flags.run} as {name}: {flags.out}")
    log(f"model = AutoModelForCausalLM.from_pretrained({flags.arguments})")


def import_folder(flags: Import, rest: Sequence[str]) -> None:
    """Raises ConfigError for an unsupported architecture, or tensors that do not match it."""
    hf_model, table = import_checkpoint.read_config(flags.folder)
    files = import_checkpoint.with_prefix(safetensors_files.read_folder(flags.folder))
    files = import_checkpoint.with_packed(files)
    hf_model = import_checkpoint.with_ties(hf_model, files)
    config = _run_config(hf_model, flags, rest)
    mappings = tensors.weight_mappings(config, hf_model.kind, hf_model.interleaved)
    import_checkpoint.check_tensors(flags.folder, hf_model, mappings, files)
    with (
        _new_folder(flags.out),
        tempfile.TemporaryDirectory(dir=flags.out, prefix="assembling-") as scratch,
        closing(Checkpoints(flags.out / "checkpoints", keep=1)) as saved,
    ):
        tokens = import_checkpoint.copy_tokenizer(
            flags.folder, flags.out / run_directory.TOKENIZER, table.get("eos_token_id")
        )
        import_checkpoint.copy_settings(flags.folder, flags.out / run_directory.HF)
        arrays = import_checkpoint.read_arrays(hf_model, mappings, files, Path(scratch))
        saved.made_by = provenance.describe_start(0)
        stacked = {f"weights.{mapping.name}": mapping.stack_dims for mapping in mappings}
        saved.save(0, arrays, dataclasses.asdict(config) | {"tokens": tokens}, stacked=stacked)
        saved.wait()
        # Last: a folder without it is not a run.
        (flags.out / "config.toml").write_text(cli.to_toml(config), encoding="utf-8")
    layers = hf_model.model.num_hidden_layers
    log(f"imported {flags.folder} as the run {flags.out}: {layers} layers")
    if hf_model.skipped_layers:
        log(f"left out: {hf_model.skipped_layers} multi-token prediction layers after {layers - 1}")
    if tokens["tokenizer"]:
        log(f'./run.sh python generate.py --run {flags.out} --prompt "..."')
    else:
        log(f"{flags.folder} has no tokenizer.json or tiktoken.model, so the run makes no text")


def _run_config(hf_model: HfModel, flags: Import, rest: Sequence[str]) -> Config:
    """Return the imported model's config on one device, overridden by main.py's flags.

    Raises  ConfigError if they change the model.
    """
    ones = "mesh.fsdp", "mesh.pipeline", "mesh.tensor"
    ones += "train.global_batch_size", "train.microbatches"
    defaults = [*(f"--{name}=1" for name in ones), "--model.compute_dtype", "auto"]
    defaults += ["--train.seq_len", str(min(hf_model.max_length, MAX_SEQ_LEN))]
    defaults += ["--run.name", flags.out.name, "--run.dir", str(flags.out.parent)]
    config = cli.parse([*defaults, *rest], Import, model=hf_model.model)
    resume.check_same_model(flags.folder, hf_model.model, config.model, "--folder")
    return config


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, or use an empty one; restore its state if the context raises.

    Raises  ConfigError for a folder that is not empty, or cannot be written.
    """
    is_new = not folder.exists()
    if not is_new and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--out {folder} is not empty, and nothing is overwritten. Give a new folder."
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
            raise ConfigError(
                f"--out {folder} was not written: {error}. Free disk space, or use another folder."
            ) from error
        raise


if __name__ == "__main__":
    errors.run_command(main)
