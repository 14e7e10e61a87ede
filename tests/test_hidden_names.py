"""No module or folder at the project's root hides an optional package from an installed library.

Python searches the project's folder first. A library that checks for an optional package `kernels`
finds a file `kernels.py` there instead, and may import it.
"""

import ast
import json
import math
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path

import pytest

from conftest import ROOT

LIBRARIES = {  # import name: distribution
    "transformers": "transformers",
    "torch": "torch",
    "lm_eval": "lm-eval",
    "datasets": "datasets",
    "jax": "jax",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
}
NEEDS_HF = {"transformers", "torch", "lm_eval"}  # installed by requirements-hf.txt
# Functions whose first argument is the name of a package.
FINDERS = re.compile(
    r"find_spec|import_module|importorskip|__import__|\w*_available\w*|\w*_module_exists"
)
HARMLESS = {  # (name, file): reason
    ("metrics", "lm_eval/tasks/longbench/utils.py"): "the file beside it; no task uses it",
}


def names_at_root() -> set[str]:
    """What `import NAME` finds in the project's folder: modules, and folders as packages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    folders = {Path(path).parts[0] for path in listed.stdout.split("\0") if "/" in path}
    folders |= {
        folder.name
        for folder in ROOT.iterdir()
        if folder.name.isidentifier() and folder.is_dir() and any(folder.rglob("*.py"))
    }
    return {name for name in folders if name.isidentifier()} | {p.stem for p in ROOT.glob("*.py")}


def imported(text: str) -> Iterator[tuple[str, int]]:
    """Each package that a source text imports or searches for by an absolute name, and its line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(text)
        except SyntaxError:  # written for a newer Python, so this one cannot import it
            return
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if FINDERS.fullmatch(function) and isinstance(node.args[0].value, str):
                found = [node.args[0].value]
        yield from ((name.partition(".")[0], node.lineno) for name in found)


@cache
def sources() -> dict[str, bytes]:
    """{path: text} of every source file of the installed libraries, as `jax/numpy/__init__.py`."""
    found = {}
    for library in LIBRARIES:
        spec = util.find_spec(library)
        for folder in spec.submodule_search_locations if spec else ():
            for file in Path(folder).rglob("*.py"):
                found[str(file.relative_to(Path(folder).parent))] = file.read_bytes()
    return found


def places(names: Iterable[str]) -> dict[str, list[str]]:
    """{name: files and lines} of those names under which the libraries import a package."""
    names = set(names)
    either = "|".join(map(re.escape, sorted(names)))
    # Parsing takes a minute, so only files with a candidate are parsed. Both patterns begin with a
    # character, which makes the search fast.
    statement = re.compile(
        rf"\n[ \t]*(?:from[ \t]+|import[ \t]+(?:[^\n]*,[ \t]*)?)(?:{either})\b".encode()
    )
    call = re.compile(rf"\(\s*[\"'](?:{either})[\"'.]".encode())
    found = defaultdict(list)
    for path, text in sources().items():
        if not statement.search(b"\n" + text) and not call.search(text):
            continue
        for name, line in imported(text.decode()):
            if name in names and name != path.split("/")[0] and (name, path) not in HARMLESS:
                found[name].append(f"{path}:{line}")
    for library, distribution in LIBRARIES.items():
        for name in names & required(distribution):
            found[name].append(f"an extra or a requirement of {library}")
    return dict(found)


@cache
def required(distribution: str) -> set[str]:
    """Import names of a distribution's requirements, its extras included; empty without it.

    A requirement that is not installed does not list its modules: its own name counts as one.
    """
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    wanted = {re.match(r"[\w.-]+", line)[0].replace("-", "_").lower() for line in lines}
    modules = {
        module
        for module, owners in modules_of_distributions().items()
        if wanted & {owner.replace("-", "_").lower() for owner in owners}
    }
    return wanted | modules


@cache
def modules_of_distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def test_no_name_at_the_root_is_one_under_which_a_library_imports_a_package():
    assert {"attention_kernels", "model", "data", "configs", "tests"} <= names_at_root()
    assert places(names_at_root()) == {}, "rename these: they hide a package from a library"


def test_every_library_is_read():
    read = {path.split("/")[0] for path in sources()}
    assert read >= LIBRARIES.keys() - NEEDS_HF
    assert read - LIBRARIES.keys() == set()


def test_optional_packages_of_datasets_and_jax_are_found():
    found = places({"duckdb", "web_pdb"})
    assert any(place.startswith("datasets/config.py:") for place in found["duckdb"])
    assert any(place.startswith("jax/") for place in found["web_pdb"])
    assert places({"no_library_imports_this"}) == {}


@pytest.mark.huggingface
def test_optional_packages_of_transformers_and_lm_eval_are_found():
    found = places({"kernels", "evaluate"})
    by_call = [p for p in found["kernels"] if p.startswith("transformers/utils/import_utils.py:")]
    assert by_call and "an extra or a requirement of transformers" in found["kernels"]
    assert any(place.startswith("lm_eval/") for place in found["evaluate"])


def test_absolute_imports_are_found_and_other_mentions_are_not():
    text = '''"""
import docstring
"""
import a, b.c
from d.e import x
from . import relative
from .relative import x
def f():
    try:
        import g as other
    except ImportError:
        pass
    importlib.util.find_spec("h") and _is_package_available("i", return_version=True)
    import_module("j.k"), import_module(".relative", "package"), pytest.importorskip("m")
    _check_module_exists("n"), _available_version("o")
    table.get("key"), getattr(x, "name"), is_available(), find_spec(name)
'''
    found = {name for name, _ in imported(text)}
    assert found - {""} == {"a", "b", "d", "g", "h", "i", "j", "m", "n", "o"}


# Opens a folder as README does, in an environment without jax.
SNIPPET = """
import json, sys
sys.modules["jax"] = None  # an import of jax raises ImportError
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    logits = model(torch.arange(8)[None]).logits
print(json.dumps([type(model).__name__, logits[0, -1].tolist(), list(sys.modules)]))
"""


@pytest.mark.huggingface
def test_transformers_opens_an_exported_folder_from_the_project_folder(tmp_path):
    if not all(map(util.find_spec, ("torch", "transformers"))):
        pytest.skip("requirements-hf.txt is not installed")
    import convert
    from hf_run import SIZES, make_run

    make_run(tmp_path / "run")
    convert.main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    # With -c the current folder is the first that Python searches.
    ended = subprocess.run(
        [sys.executable, "-c", SNIPPET, str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    name, logits, modules = json.loads(ended.stdout.splitlines()[-1])
    assert name == "DeepseekV3ForCausalLM"
    assert not names_at_root().intersection(modules), "transformers imports these of the project"
    assert len(logits) == SIZES["vocab_size"] and all(map(math.isfinite, logits))
