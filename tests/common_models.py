"""Run transformers' own common tests of models with the exported modelling file.

    ./run.sh python tests/common_models.py                 download the source distribution
    ./run.sh python tests/common_models.py --sdist FILE    use this transformers-VERSION.tar.gz

Shows that hf/modeling_latent_moe.py behaves as transformers requires of its own models: files, data
types, initialization, tied and resized embeddings, gradients, padding, outputs, a short training.
The tests are in the source distribution of transformers. It lacks those of text generation and of
torch.export; tests/test_modeling.py has some for generation. Prints each test with its result, and
why it was skipped. Exit code 1 if one fails. Needs requirements-hf.txt and pip.
"""

import argparse
import collections
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
from test_modeling import EXPERTS, SIZES

VERSION = transformers.__version__
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


class Report(unittest.TestResult):
    """Prints a line per test, which has failed or was skipped if a part of it was."""

    def stopTest(self, test):
        super().stopTest(test)
        found = {"failed": self.failures + self.errors, "skipped": self.skipped, "passed": []}
        for result in found:  # the id of a part begins with that of its test
            texts = [text for part, text in found[result] if part.id().split()[0] == test.id()]
            if texts:
                break
        self.counts[result] += 1
        reasons = dict.fromkeys(text.strip().split("\n")[-1] for text in texts)
        name = f"{type(test).__name__}.{test._testMethodName}"
        print(f"{result:8}{': '.join([name, *reasons])}", flush=True)


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
    report = Report()
    report.counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        mixins = load_mixins(Path(folder), args.sdist)
        for name, sizes in MODELS.items():
            tests = case(name, sizes, mixins)
            unittest.defaultTestLoader.loadTestsFromTestCase(tests).run(report)
    print(*(text for _, text in report.failures + report.errors), sep="\n")
    print(f"transformers {VERSION}: {dict(report.counts)}")
    sys.exit(not report.wasSuccessful())


if __name__ == "__main__":
    main()
