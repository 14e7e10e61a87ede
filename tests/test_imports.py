"""Which file may import which. `python tests/test_imports.py` draws the floors.

A file's floor is one above the highest floor that it imports from, late imports included.
"""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "attention_kernels", "benchmarks", "data", "hf", "inference", "planning", "runtime"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", *(f"{folder}/*.py" for folder in FOLDERS))
    for path in sorted(ROOT.glob(pattern))
    if path.name != "__init__.py"
}
AT_ROOT = [name for name in FILES if "." not in name]
COMMANDS = {"plan", "benchmark", "pipeline"}  # which may import planning/ and benchmarks/ at once
MOST_LINES, MODEL_LINES, MOST_FLOORS = 600, 1160, 10


def statements(body: list[ast.stmt], late: bool) -> Iterator[ast.stmt]:
    """Yield the statements that run at import; with `late` also those of functions."""
    for node in body:
        yield node
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if late or not function:
            skipped = [] if late or not typing else node.body
            inner = [n for n in ast.iter_child_nodes(node) if n not in skipped]
            yield from statements(inner, late)


def imported(text: str, late: bool = True) -> set[str]:
    """Return the files of this project that a file's text imports, as `planning.cost`."""
    found = set()
    for node in statements(ast.parse(text).body, late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


EVER = {name: imported(path.read_text()) for name, path in FILES.items()}


@functools.cache
def floor_of(name: str) -> int:
    return 1 + max((floor_of(other) for other in EVER[name]), default=0)


def drawing() -> str:
    """Return one line per floor, the highest first."""
    floors: dict[int, list[str]] = {}
    for name in FILES:
        floors.setdefault(floor_of(name), []).append(name.replace(".", "/"))
    return "\n".join(f"{n:2}  {'  '.join(floors[n])}" for n in sorted(floors, reverse=True))


def test_an_import_is_seen_where_it_runs():
    text = """
import utils, jax
from planning import cost
if TYPE_CHECKING:
    import train
try:
    class A:
        import weights
        def f(self):
            from planning.hlo import parse
except ImportError:
    import hardware
"""
    at_import = {"utils", "planning.cost", "weights", "hardware"}
    assert imported(text, late=False) == at_import
    assert imported(text) == at_import | {"train", "planning.hlo"}


def test_imports_make_no_circle_and_few_floors():
    assert list(graphlib.TopologicalSorter(EVER).static_order())  # raises with the circle
    assert max(map(floor_of, FILES)) <= MOST_FLOORS, "\n" + drawing()


def test_a_file_at_the_root_can_be_read_in_one_sitting():
    for name in AT_ROOT:
        lines = len(FILES[name].read_text(encoding="utf-8").splitlines())
        assert lines <= (MODEL_LINES if name == "model" else MOST_LINES), (name, lines)


def test_only_commands_start_with_planning_or_benchmarks_and_planning_imports_none():
    for name in {*AT_ROOT} - COMMANDS:
        found = imported(FILES[name].read_text(), late=False)
        assert not [other for other in found if other.startswith(("planning.", "benchmarks."))]
    for name in FILES:
        if name.startswith("planning."):
            assert not EVER[name] & {"main", "validate", "plan", "benchmark"}, name


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("runtime", ("runtime.", "utils", "data.manifest")),
        ("data", ("data.", "runtime.", "utils")),
        ("attention_kernels", ("attention_kernels.", "weights", "utils")),
        ("hf", ("hf.", "data.", "runtime.", "model", "weights", "utils")),
    ],
)
def test_a_folder_imports_nothing_that_is_built_on_it(folder, allowed):
    commands = {"data.show"}  # prints what a run was trained on
    for name in FILES:
        if name.startswith(f"{folder}.") and name not in commands:
            assert not [other for other in EVER[name] if not other.startswith(allowed)], name


@pytest.mark.parametrize(
    ("name", "strangers"),
    [
        ("utils", FILES.keys()),
        ("schedule", FILES.keys() - {"utils"}),
        ("weights", FILES.keys() - {"utils"}),
        ("pipeline", {"model", "sharded_model", "train", "main"}),
        ("model", {"pipeline", "schedule", "sharded_model", "train", "checkpoint", "dataset"}),
        ("sharded_model", {"optimizer", "train", "checkpoint", "dataset", "metrics", "main"}),
        ("optimizer", {"model", "sharded_model", "train"}),
        ("train", {"checkpoint", "dataset", "metrics", "main"}),
        ("checkpoint", {"sharded_model", "train", "main"}),
        ("dataset", {"model", "train", "main"}),
        ("data.cluster", {"data.sources", "data.prepare"}),
        ("runtime.watchdog", FILES.keys() - {"runtime.errors"}),
    ],
)
def test_a_file_does_not_import_what_is_built_on_it(name, strangers):
    assert not EVER[name] & strangers


if __name__ == "__main__":
    print(drawing())
