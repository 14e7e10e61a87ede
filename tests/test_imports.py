"""Which file may import which, and how text is read. `python tests/test_imports.py` draws floors.

A file's floor is one above the highest floor that it imports from, late imports included.
"""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "device_kernels", "benchmarks", "data", "hf", "inference", "planning", "runtime"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", *(f"{folder}/*.py" for folder in FOLDERS))
    for path in sorted(ROOT.glob(pattern))
    if path.name != "__init__.py"
}
AT_ROOT = [name for name in FILES if "." not in name]
COMMANDS = {"plan", "benchmark", "pipeline"}  # which may import planning/ and benchmarks/ at once
OTHERS = ("tests/", "guide/", ".venv/", ".cache/", "runs/")  # folders of other programs
MOST_LINES, MOST_FLOORS = 600, 12
# Of parts of the model.
KERNELS_OF = {
    "routing": (),
    "experts": ("matrix",),
    "vocabulary": ("device_kernels.cross_entropy",),
}


def statements(body, late):
    """Yield the statements that run at import; with `late` also those of functions."""
    for node in body:
        yield node
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if late or not (function or typing):
            yield from statements(ast.iter_child_nodes(node), late)


def imported(text, late=True):
    """Return the files of this project that a file's text imports, as `planning.cost`."""
    names = set()
    for node in statements(ast.parse(text).body, late):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


EVER = {name: imported(path.read_text()) for name, path in FILES.items()}


@functools.cache
def floor_of(name):
    return 1 + max((floor_of(other) for other in EVER[name]), default=0)


def drawing():
    """Return one line per floor, the highest first."""
    floors = {}
    for name in FILES:
        floors.setdefault(floor_of(name), []).append(name.replace(".", "/"))
    return "\n".join(f"{n:2}  {'  '.join(floors[n])}" for n in sorted(floors, reverse=True))


def test_imports_make_no_circle_and_few_floors():
    assert list(graphlib.TopologicalSorter(EVER).static_order())  # raises with the circle
    assert max(map(floor_of, FILES)) <= MOST_FLOORS, "\n" + drawing()


def test_a_file_at_the_root_can_be_read_in_one_sitting():
    for name in AT_ROOT:
        lines = len(FILES[name].read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES, (name, lines)


def test_only_commands_start_with_planning_or_benchmarks_and_planning_imports_none():
    assert {"planning.cost", "train"} <= EVER["main"], "late imports are seen, too"
    for name in {*AT_ROOT} - COMMANDS:
        early = imported(FILES[name].read_text(), late=False)
        assert not [other for other in early if other.startswith(("planning.", "benchmarks."))]
    for name in FILES:
        if name.startswith("planning."):
            assert not EVER[name] & {"main", "validate", "plan", "benchmark"}, name


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("runtime", ("runtime.", "utils", "data.manifest")),
        ("data", ("data.", "runtime.", "utils")),
        ("device_kernels", ("device_kernels.", "attention", "experts", "weights", "utils")),
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
        ("depth", FILES.keys() - {"utils", "runtime.cli"}),
        ("schedule", FILES.keys() - {"utils"}),
        ("weights", FILES.keys() - {"utils"}),
        ("pipeline", {"model", "sharded_model", "train", "main"}),
        *((part, FILES.keys() - {"utils", "weights", *KERNELS_OF[part]}) for part in KERNELS_OF),
        ("model", {"pipeline", "schedule", "sharded_model", "train", "checkpoint", "dataset"}),
        ("sharded_model", {"optimizer", "train", "checkpoint", "dataset", "metrics", "main"}),
        ("optimizer", {"model", "sharded_model", "train"}),
        ("train", {"checkpoint", "dataset", "metrics", "main"}),
        ("checkpoint", {"sharded_model", "train", "main"}),
        ("dataset", {"model", "train", "main"}),
        ("data.cluster", {"data.sources", "data.prepare"}),
    ],
)
def test_a_file_does_not_import_what_is_built_on_it(name, strangers):
    assert not EVER[name] & strangers


def without_encoding(source):
    """Return the lines of calls that read or write text by the locale's charset."""
    lines = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        method = isinstance(call.func, ast.Attribute)
        modes = [a.value for a in call.args[:2] if isinstance(a, ast.Constant)]
        modes += [getattr(k.value, "value", "b") for k in call.keywords if k.arg == "mode"]
        is_text = method and name in ("read_text", "write_text")
        is_open = name in ("open", "fdopen") and not any("b" in str(m) for m in modes)
        own = method and getattr(call.func.value, "id", "") in ("ts", "tokenize")
        if (is_text or is_open) and not own and "encoding" not in {k.arg for k in call.keywords}:
            lines.append(call.lineno)
    return lines


def test_no_file_is_read_or_written_by_the_charset_of_the_locale():
    files = [f for f in ROOT.rglob("*.py") if not str(f.relative_to(ROOT)).startswith(OTHERS)]
    calls = {str(f): without_encoding(f.read_text(encoding="utf-8")) for f in files}
    assert files and not {name: lines for name, lines in calls.items() if lines}
    for call in ("open(p)", "p.read_text()", "p.open('w')", "p.write_text(t)"):
        assert without_encoding(call) == [1]


if __name__ == "__main__":
    print(drawing())
