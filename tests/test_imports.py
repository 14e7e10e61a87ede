"""Which file may know which: read from the imports, and nothing is imported here."""

import ast
import graphlib
from collections.abc import Iterator

import pytest

from conftest import ROOT

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", "planning/*.py", "data/*.py")
    for path in sorted(ROOT.glob(pattern))
}
PLANNING = {name for name in FILES if name.startswith("planning.")}
PROGRAMS = {name for name in FILES if name == "plan" or name.startswith("benchmark")}


def statements(body: list[ast.stmt], late: bool) -> Iterator[ast.stmt]:
    """Those that run when the file is imported; with `late` all, also those of functions and of
    TYPE_CHECKING.
    """
    for node in body:
        yield node
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if late or not function:
            skipped = [] if late or not typing else node.body
            inner = [n for n in ast.iter_child_nodes(node) if n not in skipped]
            yield from statements(inner, late)


def imported(text: str, late: bool = False) -> set[str]:
    """The files of this project that a file's text imports, by name as `planning.cost`."""
    found = set()
    for node in statements(ast.parse(text).body, late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


AT_IMPORT = {name: imported(path.read_text()) for name, path in FILES.items()}
EVER = {name: imported(path.read_text(), late=True) for name, path in FILES.items()}


def test_an_import_is_seen_where_it_runs():
    text = """
import utils, jax
from planning import cost
if TYPE_CHECKING:
    import train
else:
    from data.tokenizer import load_tokenizer
try:
    class A:
        import weights
        def f(self):
            import plot
except ImportError:
    import chips
def f():
    if True:
        from planning.hlo import parse
"""
    at_import = {"utils", "planning.cost", "data.tokenizer", "weights", "chips"}
    assert imported(text) == at_import
    assert imported(text, late=True) == at_import | {"train", "plot", "planning.hlo"}


def test_only_plan_and_the_benchmarks_start_with_planning():
    users = {name for name, found in AT_IMPORT.items() if found & PLANNING} - PLANNING
    assert users == {name for name in PROGRAMS if EVER[name] & PLANNING}
    assert "plan" in users


def test_planning_knows_the_program_and_none_of_the_commands():
    assert any(EVER[name] - PLANNING for name in PLANNING)
    for name in PLANNING:
        assert not EVER[name] & {*PROGRAMS, "main", "validate"}, name


def test_imports_make_no_circle():
    assert list(graphlib.TopologicalSorter(AT_IMPORT).static_order())  # raises with the circle


@pytest.mark.parametrize(
    ("name", "strangers"),
    [
        ("utils", FILES.keys()),
        ("schedule", FILES.keys()),
        ("weights", FILES.keys() - {"utils"}),
        ("pipeline", {"model", "passes", "train", "main"}),
        ("model", {"pipeline", "schedule", "passes", "train", "checkpoint", "dataset", "main"}),
        ("passes", {"train", "checkpoint", "dataset", "metrics", "main"}),
        ("train", {"checkpoint", "dataset", "metrics", "main"}),
        ("checkpoint", {"passes", "train", "main", "resume"}),
        ("manifest", FILES.keys() - {"buckets", "faults"}),
        ("token_files", FILES.keys() - {"buckets", "faults", "manifest"}),
        ("buckets", FILES.keys() - {"faults"}),
        ("checkpoint_folder", FILES.keys() - {"buckets", "faults"}),
        (
            "run_folder",
            FILES.keys() - {"buckets", "checkpoint_folder", "faults", "metrics", "utils"},
        ),
        (
            "lock",
            FILES.keys() - {"buckets", "faults", "metrics", "multihost", "preflight", "utils"},
        ),
        ("faults", FILES.keys()),
        ("watchdog", FILES.keys() - {"faults"}),
        ("stop", FILES.keys() - {"faults", "watchdog"}),
        ("preflight", FILES.keys() - {"faults"}),
        ("multihost", FILES.keys() - {"faults", "preflight"}),
        ("data.settings", FILES.keys()),
        (
            "data.readers",
            {"data.sources", "data.chat", "data.encode", "data.shards", "data.prepare"},
        ),
        ("data.sources", {"data.encode", "data.shards", "data.prepare"}),
        ("data.shards", {"data.readers", "data.sources", "data.encode", "data.prepare"}),
        ("data.encode", {"data.sources", "data.prepare", "data.cluster"}),
        ("data.cluster", {"data.sources", "data.prepare"}),
    ],
)
def test_a_file_does_not_know_what_is_built_on_it(name, strangers):
    assert not EVER[name] & strangers
