"""Run transformers' own common tests of models with the exported modelling file.

    ./run.sh python tests/common_models.py                 download the source distribution
    ./run.sh python tests/common_models.py --sdist FILE    use this transformers-VERSION.tar.gz

Shows that hf/modeling_latent_moe.py behaves as transformers requires of its own models: files, data
types, initialization, tied and resized embeddings, gradients, padding, outputs, a short training.
The tests are in the source distribution of transformers. It lacks those of text generation and of
torch.export; tests/system/test_transformers.py has some for generation. Prints each test with
its result, and why it was skipped. Exit code 1 if one fails. Needs requirements-hf.txt and pip.
"""

import argparse
import importlib
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf.modeling_latent_moe import LatentMoeConfig, LatentMoeForCausalLM, LatentMoeModel

VERSION = transformers.__version__
SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "qk_norm": True,
    "attention_bias": True, "attention": "gqa", "q_lora_rank": 5, "kv_lora_rank": 10,
    "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 1e-6,
    "latent_rms_norm_eps": 0.0, "rope_theta": 100.0, "yarn": None, "n_routed_experts": 0,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "no_rope_layer_interval": 0,
    "eos_token_id": 49, "pad_token_id": 0, "tie_word_embeddings": True,
    "max_position_embeddings": 64, "use_cache": True,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 1.0,
}  # fmt: skip
MODELS = {
    "Dense": SIZES | {"num_hidden_layers": 2},
    "Experts": SIZES | {"num_hidden_layers": 2, "attention": "mla"} | EXPERTS,
}
ABSENT = {  # what the common tests import, and the source distribution lacks
    "hf_tests.generation.test_utils": "GenerationTesterMixin",
    "hf_tests.exporters.test_export": "ExportTesterMixin",
}
SKIPPED = {  # begins of names, in addition to what the tests skip themselves
    "test_bc_cache_name_forward": "`past_key_values`, the only name in transformers 4, is accepted "
    "without a warning",
    "test_generation_tester_mixin_inheritance": "the tests of text generation are absent",
    "test_headmasking": "the file cannot mask single heads",
    "test_head_pruning": "the file cannot remove single heads",
}


def load_mixins(folder: Path, sdist: Path | None) -> list[type]:
    """Unpack the tests of the installed transformers into `folder`, and import the common ones."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if sdist is None:
        flags = ["--no-deps", "--no-binary=transformers", f"--dest={folder}"]
        subprocess.run([*pip, "download", *flags, f"transformers=={VERSION}"], check=True)
        sdist = folder / f"transformers-{VERSION}.tar.gz"
    if sdist.name != f"transformers-{VERSION}.tar.gz":
        sys.exit(f"{sdist} is not transformers-{VERSION}.tar.gz, the version that is installed.")
    needed = ["--no-deps", f"--target={folder}", "parameterized==0.9.0"]
    subprocess.run([*pip, "install", *needed], check=True)
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            if Path(member.name).match("transformers-*/tests/*.py"):
                member.name = f"hf_tests/{Path(member.name).name}"
                archive.extract(member, folder, filter="data")
    for name, mixin in ABSENT.items():
        sys.modules[name.rpartition(".")[0]] = types.ModuleType(name.rpartition(".")[0])
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], mixin, type(mixin, (), {}))
    sys.path.insert(0, str(folder))
    modules = {"test_modeling_common": "ModelTesterMixin"}
    if not VERSION.startswith("4."):
        modules["test_training_mixin"] = "TrainingTesterMixin"
    return [getattr(importlib.import_module(f"hf_tests.{m}"), cls) for m, cls in modules.items()]


class ModelTester:
    """A config and inputs, by the names that the common tests use."""

    batch_size, seq_length, is_training = 3, 7, True
    causal_lm_class = LatentMoeForCausalLM

    def __init__(self, sizes: dict):
        vars(self).update(sizes, sizes=sizes)

    def get_config(self) -> LatentMoeConfig:
        return LatentMoeConfig(**self.sizes)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(1, self.vocab_size - 1, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids).tril(4)  # two texts have padding on the right
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


def case(name: str, sizes: dict, mixins: list[type]) -> type[unittest.TestCase]:
    """Return the tests of a model of these sizes."""
    contents = {
        "all_model_classes": (LatentMoeModel, LatentMoeForCausalLM),
        "model_tester": ModelTester(sizes),
        "test_can_init_all_missing_weights_before_2023": True,  # the file names no year
    }
    for begin, reason in SKIPPED.items():
        skip = unittest.skip(reason)(lambda self: None)
        contents |= {test: skip for test in dir(mixins[0]) if test.startswith(begin)}
    return type(name, (*mixins, unittest.TestCase), contents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sdist", type=Path, help="the source distribution, if it is here already")
    args = parser.parse_args()
    # Tests choose labels by the names of the classes that transformers lists.
    modeling_auto.MODEL_MAPPING_NAMES["latent_moe"] = "LatentMoeModel"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["latent_moe"] = "LatentMoeForCausalLM"
    transformers.AutoConfig.register("latent_moe", LatentMoeConfig)
    transformers.AutoModel.register(LatentMoeConfig, LatentMoeModel)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        mixins = load_mixins(Path(folder), args.sdist)
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        tests = [load(case(name, sizes, mixins)) for name, sizes in MODELS.items()]
        report = unittest.TextTestRunner(sys.stdout, verbosity=2).run(unittest.TestSuite(tests))
    print(f"transformers {VERSION}")
    sys.exit(not report.wasSuccessful())


if __name__ == "__main__":
    main()
