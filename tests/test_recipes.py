"""The commands of recipes/, with stand-ins for run.sh and launcher.sh."""

import os
import shutil
import subprocess

import pytest

from conftest import ROOT
from data.prepare import main as prepare
from runtime import jsonl
from simulated_hosts import write_script

CALL = 'echo "$(basename "$0") $*" >>calls\n'
# A line of `states` is the exit code of a status, and what it prints after the head.
STATUS = """[[ " $* " == *" status "* ]] || exit 0
read -r code text <states && sed -i 1d states
printf 'host               state              step\\nh0                 %s\\n' "$text"
exit "$code"
"""
NEVER, UP, ENDED, FAILED = "1 never started", "0 up 9 s", "0 ended with 0", "1 ended with 2"


@pytest.fixture
def recipe(tmp_path):
    """Run a recipe, and return the process and the calls of run.sh and launcher.sh."""

    def run(name, *flags, states=(), **environment):
        small = {"PATH": os.environ["PATH"], "POLL_S": "0", "NEEDED_GB": "0"}
        (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
        (tmp_path / "calls").write_text("")
        command = [tmp_path / "recipes" / name, *flags]
        done = subprocess.run(
            command, env=small | environment, capture_output=True, text=True, cwd="/"
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    write_script(tmp_path / "run.sh", CALL)
    write_script(tmp_path / "launcher.sh", CALL + STATUS)
    return run


def test_the_recipe_of_a_laptop_calls_each_command_and_prints_how_to_chat(recipe):
    done, calls = recipe("laptop.sh", "--train.steps", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("./run.sh python generate.py --run runs/laptop-chat --chat\n")
    scripts = [call.split()[2] for call in calls]
    chat = ["recipes/conversations.py", "data/prepare.py", "data/prepare.py"]
    first = ["data/train_tokenizer.py", "data/prepare.py", "main.py"]
    assert scripts == [*first, *chat, "main.py", "validate.py", "convert.py"]
    trained = [call for call in calls if "main.py" in call]
    assert all(call.endswith("--train.steps 7") for call in trained)
    assert "--depth 2 --train.steps 500 --data.train data/laptop/text/train" in trained[0]
    assert "--run.init_from runs/laptop --data.train data/laptop/chat/train" in trained[1]
    assert all("--chat-template tokenizer" in call for call in calls[4:6])


def test_own_data_take_the_place_of_those_of_the_hub(recipe):
    done, calls = recipe("eight_gpus.sh")
    assert done.returncode == 0, done.stderr
    assert f"--source hf:HuggingFaceFW/fineweb-edu --max-tokens {1100000 * 20**3} " in calls[1]
    assert "--depth 20 --data" in calls[2], "its steps are those of the depth"
    assert "--source hf:HuggingFaceTB/smol-smoltalk" in calls[3]
    own = {"TEXT": "/notes", "CHAT": "/chat.jsonl", "DEPTH": "3", "TOKENIZER": "gpt2"}
    done, calls = recipe("one_gpu.sh", **own)
    assert "prepare.py --tokenizer gpt2 --source /notes --max-tokens 29700000 " in calls[0]
    assert "--source /chat.jsonl --skip-bad --chat --chat-template plain" in calls[2]
    assert "--depth 3 " in calls[1] and "hf:" not in "".join(calls)


def test_too_little_disk_and_missing_names_are_refused_before_the_first_command(recipe):
    done, calls = recipe("laptop.sh", NEEDED_GB="99999999")
    assert (done.returncode, calls) == (2, [])
    assert "GB free, and needs 99999999. Free some" in done.stderr
    done, calls = recipe("tpu_pod.sh", TPU="pod", ZONE="z")
    assert (done.returncode, calls) == (2, [])
    assert "set TPU, ZONE and BUCKET" in done.stderr
    done, calls = recipe("laptop.sh", "--help")
    assert "TEXT=${TEXT:-python-stdlib}" in done.stdout and calls == [] and not done.returncode


POD = {"TPU": "pod", "ZONE": "z", "BUCKET": "gs://b"}


def test_a_pod_trains_and_validates_on_its_hosts_one_command_after_another(recipe):
    once = [ENDED, UP, UP, ENDED, ENDED]
    done, calls = recipe("tpu_pod.sh", "--a.b=1", states=[NEVER, *once[1:], *once, *once], **POD)
    assert done.returncode == 0, done.stderr
    launches = [call for call in calls if call.startswith("launcher") and " -- " in call]
    commands = [call.split(" -- python ")[1] for call in launches]
    assert [command.split()[0] for command in commands] == ["main.py", "main.py", "validate.py"]
    assert all("--tpu pod --zone z --name pod --keep-alive 5" in call for call in launches)
    assert "--run.dir gs://b/runs --run.name pod --a.b=1" in commands[0]
    own = [call for call in calls if call.startswith("run.sh")]
    assert "prepare.py --tokenizer gpt2" in own[0] and "--out gs://b/data/pod/text" in own[0]
    assert calls.index(launches[1]) - calls.index(launches[0]) == 7, "5 states and a preparation"


def test_a_pod_waits_for_an_earlier_start_and_ends_with_a_failed_command(recipe):
    done, calls = recipe("tpu_pod.sh", states=[UP, ENDED, FAILED, FAILED], **POD)
    assert done.returncode == 1 and "ended with 2" in done.stdout
    kinds = ["status" if call.endswith("status") else "other" for call in calls]
    assert kinds == ["other", "status", "status", "other", "status", "status"]


def test_conversations_are_of_functions_that_are_in_one_file_alone(tmp_path):
    command = ["./run.sh", "python", "recipes/conversations.py", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    asked = {}
    for name in ("train", "heldout"):
        rows = jsonl.read(tmp_path / f"{name}.jsonl")
        asked[name] = {row["prompt"].split()[2] for row in rows if row["prompt"].endswith("do?")}
        assert len(rows) == 2 * len(asked[name])
        if any("textwrap.dedent" in row["prompt"] for row in rows):
            answers = {row["answer"] for row in rows if "textwrap.dedent" in row["prompt"]}
            assert "textwrap.dedent(text)" in answers
            assert "Remove any common leading whitespace from every line in `text`." in answers
    assert not asked["train"] & asked["heldout"]
    assert 0.05 < len(asked["heldout"]) / len(asked["train"]) < 0.2
    prepare(["--source", str(tmp_path / "heldout.jsonl"), "--chat", "--out", str(tmp_path / "out")])
