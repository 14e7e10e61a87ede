"""No module or folder at the project's root hides an optional package from an installed library.

Python searches the project's folder first. A library that checks for an optional package `kernels`
finds a file `kernels.py` there instead, and may import it.
"""

import ast
import contextlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import pytest

import convert
from conftest import ROOT
from hf_run import make_run

LIBRARIES = ("datasets", "jax", "flax", "optax", "orbax", "transformers", "torch", "lm_eval")
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "lm_eval": "lm-eval"}  # of another name
# Functions whose first argument is the name of a package.
FINDERS = re.compile(
    r"find_spec|import_module|importorskip|__import__|\w*_available\w*|\w*_module_exists"
)
HARMLESS = {"lm_eval/tasks/longbench/utils.py"}  # imports a file beside it; no task uses it


def names_at_root() -> set[str]:
    """What `import NAME` finds in the project's folder: modules, and folders as packages."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folders = {path.partition("/")[0] for path in listed.splitlines() if "/" in path}
    folders |= {f.name for f in ROOT.iterdir() if any(f.rglob("*.py"))}
    return {name for name in folders if name.isidentifier()} | {p.stem for p in ROOT.glob("*.py")}


def imported(text: str) -> Iterator[str]:
    """Each package that a source text imports or searches for by an absolute name."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError):  # of a newer Python
        warnings.simplefilter("ignore", SyntaxWarning)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]
            elif (
                isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
            ):
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if FINDERS.fullmatch(function):
                    yield str(node.args[0].value).partition(".")[0]


def places(names: set[str]) -> set[tuple[str, str]]:
    """(name, file or library) of those names under which the libraries import a package."""
    found = set()
    # Parsing takes a minute, so only files with a candidate are parsed. Both patterns begin with a
    # character, which makes the search fast.
    either = "|".join(map(re.escape, sorted(names)))
    statement = rf"\n[ \t]*(?:from[ \t]+|import[ \t]+(?:[^\n]*,[ \t]*)?)(?:{either})\b"
    call = rf"\(\s*[\"'](?:{either})[\"'.]"
    for library in filter(util.find_spec, LIBRARIES):
        for folder in map(Path, util.find_spec(library).submodule_search_locations):
            for file in folder.rglob("*.py"):
                path, text = str(file.relative_to(folder.parent)), file.read_text()
                if re.search(statement, "\n" + text) or re.search(call, text):
                    hidden = names.intersection(imported(text)) - {library}
                    found |= {(name, path) for name in hidden if path not in HARMLESS}
        required = metadata.requires(DISTRIBUTIONS.get(library, library)) or ()  # and extras
        plain = {re.match(r"[\w.-]+", name)[0].replace("-", "_").lower() for name in required}
        found |= {(name, library) for name in names & plain}
    return found


def test_no_name_at_the_root_is_one_under_which_a_library_imports_a_package():
    assert {"device_kernels", "model", "data", "configs", "tests"} <= names_at_root()
    known = {  # packages that are found
        ("duckdb", "datasets/config.py"),
        ("web_pdb", "jax/_src/debugger/web_debugger.py"),
        ("kernels", "transformers/utils/import_utils.py"),
        ("kernels", "transformers"),  # an extra
    }
    optional = {name for name, _ in known}
    found = places(names_at_root() | optional)
    assert {each for each in known if util.find_spec(each[1].partition("/")[0])} <= found
    assert not {each for each in found if each[0] not in optional}, "they hide a package: rename"


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
