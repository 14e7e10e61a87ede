"""The notebooks, in a small size: a model is trained, exported, tuned and asked."""

import json
import os
import shutil

import pytest

from mutants import copy_tree
from processes import FAST, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FLAGS = """--train.steps 2 --train.global_batch_size 8 --eval.sequences 8 --sample.every_steps 0
--mesh.fsdp 1 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches 1"""
SMALL = {  # notebook -> settings in place of its own
    "train": {"DEPTH": 1, "STEPS": "2", "TEXT": "text", "FLAGS": " ".join(FLAGS.split())},
    "tune": {"FOLDER": "exported/notebook", "FLAGS": " ".join(FLAGS.split())},
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_results(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.notebooks
def test_the_notebooks_run_from_text_to_a_tuned_export(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    tree = tmp_path / "tree"
    copy_tree(tree)
    (tree / "text").mkdir()
    for file in (tree / "runtime").glob("*.py"):  # and no compiled files
        shutil.copy(file, tree / "text")
    for name in [*os.environ]:  # other tests, and recipes, have variables of their own
        if name not in ("PATH", "HOME", "TMPDIR", "LANG") and not name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", " ".join(FAST))
    monkeypatch.setenv("VOCAB", "400")
    # The kernel's backend of pictures, which the environment of run.sh need not have.
    monkeypatch.setenv("MPLBACKEND", "module://not_installed")
    for name, settings in SMALL.items():
        notebook = nbformat.read(tree / "notebooks" / f"{name}.ipynb", as_version=4)
        cells = []
        for cell in notebook.cells:
            tags = cell.metadata.get("tags", [])
            if cell.cell_type == "code" and "download" not in tags:
                cells.append(cell)
                after = "assert globals().get('_exit_code', 0) == 0"
                if "parameters" in tags:
                    after = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
                cells.append(nbformat.v4.new_code_cell(after))
        notebook.cells = cells
        kernel = {"metadata": {"path": str(tree / "notebooks")}}
        client = nbclient.NotebookClient(notebook, timeout=600, resources=kernel, allow_errors=True)
        client.execute()
        shown = [output for cell in cells for output in cell.get("outputs", [])]
        text = "".join(output.get("text", "") for output in shown)
        assert not [o for o in shown if o.output_type == "error"], text[-3000:]
        assert sum("image/png" in output.get("data", {}) for output in shown) == 1
        assert text.count("tokens: the first after") == 2, text[-3000:]
    assert (tree / "exported" / "tuned" / "config.json").exists()
