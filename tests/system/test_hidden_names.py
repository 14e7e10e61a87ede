"""No module or folder at the project's root hides an optional package from an installed library.

Python searches the project's folder first. A library that checks for an optional package `kernels`
finds a file `kernels.py` there instead, and may import it.
"""

import ast
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

import convert
from conftest import ROOT
from hf_run import make_run

# Import names; those of NEEDS_HF are installed by requirements-hf.txt.
NEEDS_HF = {"transformers": "transformers", "torch": "torch", "lm_eval": "lm-eval"}
LIBRARIES = NEEDS_HF | {"orbax": "orbax-checkpoint"}
LIBRARIES |= {name: name for name in ("datasets", "jax", "flax", "optax")}  # distributions
# Functions whose first argument is the name of a package.
FINDERS = re.compile(
    r"find_spec|import_module|importorskip|__import__|\w*_available\w*|\w*_module_exists"
)
HARMLESS = {  # (name, file): reason
    ("metrics", "lm_eval/tasks/longbench/utils.py"): "the file beside it; no task uses it",
}


def names_at_root() -> set[str]:
    """What `import NAME` finds in the project's folder: modules, and folders as packages."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folders = {path.partition("/")[0] for path in listed.split("\0") if "/" in path}
    folders |= {f.name for f in ROOT.iterdir() if f.name.isidentifier() and any(f.rglob("*.py"))}
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
    specs = filter(None, map(util.find_spec, LIBRARIES))
    folders = [Path(folder) for spec in specs for folder in spec.submodule_search_locations]
    return {
        str(file.relative_to(folder.parent)): file.read_bytes()
        for folder in folders
        for file in folder.rglob("*.py")
    }


def places(names: Iterable[str]) -> dict[str, list[str]]:
    """{name: files and lines} of those names under which the libraries import a package."""
    names, found = set(names), defaultdict(list)
    either = "|".join(map(re.escape, sorted(names)))
    # Parsing takes a minute, so only files with a candidate are parsed. Both patterns begin with a
    # character, which makes the search fast.
    statement = re.compile(
        rf"\n[ \t]*(?:from[ \t]+|import[ \t]+(?:[^\n]*,[ \t]*)?)(?:{either})\b".encode()
    )
    call = re.compile(rf"\(\s*[\"'](?:{either})[\"'.]".encode())
    for path, text in sources().items():
        if statement.search(b"\n" + text) or call.search(text):
            for name, line in imported(text.decode()):
                if name in names - {path.split("/")[0]} and (name, path) not in HARMLESS:
                    found[name].append(f"{path}:{line}")
    for library, distribution in LIBRARIES.items():
        for name in names & required(distribution):
            found[name].append(f"an extra or a requirement of {library}")
    return dict(found)


def required(distribution: str) -> set[str]:
    """Names of requirements, those of extras included, and modules of installed ones."""

    def plain(name: str) -> str:
        return re.match(r"[\w.-]+", name)[0].replace("-", "_").lower()

    try:
        wanted = {*map(plain, metadata.requires(distribution) or [])}
    except metadata.PackageNotFoundError:
        return set()
    owners = metadata.packages_distributions()
    return wanted | {module for module in owners if wanted & {*map(plain, owners[module])}}


def test_no_name_at_the_root_is_one_under_which_a_library_imports_a_package():
    assert {"attention_kernels", "model", "data", "configs", "tests"} <= names_at_root()
    assert places(names_at_root()) == {}, "rename these: they hide a package from a library"
    read = {path.split("/")[0] for path in sources()}
    assert LIBRARIES.keys() - NEEDS_HF <= read <= LIBRARIES.keys()


def test_optional_packages_of_libraries_are_found():
    found = places({"duckdb", "web_pdb", "kernels", "evaluate", "no_library_imports_this"})
    assert any(place.startswith("datasets/config.py:") for place in found.pop("duckdb"))
    assert any(place.startswith("jax/") for place in found.pop("web_pdb"))
    if all(map(util.find_spec, NEEDS_HF)):
        by_call = found["kernels"]
        assert any(place.startswith("transformers/utils/import_utils.py:") for place in by_call)
        assert "an extra or a requirement of transformers" in by_call
        assert any(place.startswith("lm_eval/") for place in found["evaluate"])
    assert "no_library_imports_this" not in found


# Opens a folder as README does, in an environment without jax.
SNIPPET = """
import sys
sys.modules["jax"] = None  # an import of jax raises ImportError
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert model(torch.arange(8)[None]).logits.isfinite().all()
print(type(model).__name__, *sys.modules)
"""


@pytest.mark.huggingface
def test_transformers_opens_an_exported_folder_from_the_project_folder(tmp_path):
    make_run(tmp_path / "run")
    convert.main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    # With -c the current folder is the first that Python searches.
    command = [sys.executable, "-c", SNIPPET, str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    name, *modules = ended.stdout.splitlines()[-1].split()
    assert name == "DeepseekV3ForCausalLM"
    assert not names_at_root().intersection(modules), "transformers imports these of the project"
