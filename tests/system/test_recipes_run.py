"""recipes/laptop.sh from text to chat in a small size, killed on its way and started again."""

import hashlib
import os
import shutil
import signal
import subprocess

import pytest

from mutants import copy_tree
from processes import FAST
from runtime import run_directory
from simulated_hosts import wait_for

FLAGS = """--train.steps 60 --train.global_batch_size 8 --eval.sequences 8 --eval.every_steps 30
--checkpoint.every_steps 4 --sample.every_steps 0 --mesh.fsdp 1 --mesh.pipeline 1 --mesh.tensor 1
--train.microbatches 1"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("recipe") / "tree"
    copy_tree(tree)
    (tree / "text").mkdir()
    for file in (tree / "runtime").glob("*.py"):  # and no compiled files
        shutil.copy(file, tree / "text")
    return tree


def start(tree, log):
    small = {"TEXT": str(tree / "text"), "VOCAB": "400", "DEPTH": "1", "NAME": "small"}
    environment = os.environ | small | {"XLA_FLAGS": " ".join(FAST)}
    with log.open("w") as file:
        return subprocess.Popen(
            [tree / "recipes" / "laptop.sh", *FLAGS.split()],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def content(tree):
    """The hash of each file that a step made, without records of starts and pictures."""
    folders = "data/small", "exported", "runs/small/checkpoints", "runs/small-chat/checkpoints"
    files = (path for name in folders for path in (tree / name).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_killed_recipe_resumes_ends_and_then_does_nothing_new(tree, tmp_path):
    process, run = start(tree, tmp_path / "first"), run_directory.at(tree / "runs" / "small")
    try:
        wait_for(lambda: run.saved_steps() or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "first").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "== 3." not in (tmp_path / "first").read_text()
    for name in ("second", "third"):
        made, log = content(tree), tmp_path / name
        assert start(tree, log).wait(900) == 0, log.read_text()[-3000:]
        text = log.read_text()
        assert text.endswith("./run.sh python generate.py --run runs/small-chat --chat\n")
        assert "of which 3 are special" not in text, "the tokenizer was there"
        if name == "second":
            assert "small/text is already prepared" in text and "small: continues after" in text
            assert (tree / "exported" / "small" / "config.json").exists()
    assert content(tree) == made and len(made) > 20
    assert text.count("is already prepared with these settings") == 3
    assert text.count("finished before.") == 2 and "exported/small\n" not in text
    chat = ["python", "generate.py", "--run", "runs/small-chat", "--chat", "--tokens", "3"]
    answered = subprocess.run(
        [tree / "run.sh", *chat], input="Hello\n\n", capture_output=True, text=True, check=True
    )
    assert "tokens: the first after" in answered.stderr and "using `plain`" not in answered.stderr
