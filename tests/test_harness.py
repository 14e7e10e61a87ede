"""A checkpoint under lm-evaluation-harness, on tasks of local files."""

import json
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest

import model
import questions
import resume
import run_folder
import train
import validate

WORDS = ["import", "def", "class", "return", "self", "None", "True", "for", "if", "else"]
WORDS += ["while", "with", "try", "print"]
ASKED = [
    {"prompt": prompt, "choices": [f" {word}" for word in WORDS[i : i + 3]], "answer": i % 3}
    for i, prompt in enumerate([*WORDS[:10], "x = 1\n" * 30 + "y"])
]
CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """
task: own_writing
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: target
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval")
    with warnings.catch_warnings():  # those of its packages are theirs to mend
        warnings.simplefilter("ignore")
        import harness
    # To look through its thousands of tasks takes seconds.
    harness.TaskManager = partial(harness.TaskManager, include_defaults=False)
    return harness


@pytest.fixture(scope="module")
def known(whole):
    """(config, declared, mesh, weights, tokenizer, end of text, begin) of the tiny run."""
    config = resume.config_of(run_folder.at(whole), [], validate.Flags)
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    _, w, told = resume.weights_of(run_folder.at(whole), None, shapes)
    return config, declared, mesh, w, *resume.tokenizer_of(told["tokens"], config)


@pytest.fixture(scope="module")
def asked(harness, known):
    return harness.Model(*known)


def of(*pairs):
    """Requests as the harness makes them."""
    return [SimpleNamespace(args=pair) for pair in pairs]


GREEDY = {"until": [], "max_gen_toks": 6}


@pytest.fixture(scope="module")
def texts(asked):
    """What the model goes on with after each word."""
    return asked.generate_until(of(*((word, GREEDY) for word in WORDS)))


@pytest.fixture
def folder(tmp_path, texts):
    rows = {
        "choice": ASKED,
        "writing": [
            {"prompt": word, "target": text if i % 4 else "other"}
            for i, (word, text) in enumerate(zip(WORDS, texts, strict=True))
        ],
    }
    for name, yaml in (("choice", CHOICE), ("writing", WRITING)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows[name]))
        (tmp_path / f"{name}.yaml").write_text(yaml.replace("FILE", str(file)))
    return tmp_path


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_own_files_are_answered_as_questions_are(harness, whole, folder, known, capsys):
    flags = ["--run", str(whole), "--json"]
    file = folder / "choice.jsonl"
    validate.main([*flags, "--questions", str(file)])
    ours = json.loads(capsys.readouterr().out)
    tasks = ["--lm_eval", "own_choice,own_writing", "--include_path", str(folder)]
    validate.main([*flags, *tasks])
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 6
    choice, writing = (found["results"][f"own_{name}"] for name in ("choice", "writing"))
    assert choice["sample_len"] == len(ASKED)
    assert choice["acc,none"] == ours["accuracy"]
    assert choice["acc_norm,none"] == ours["accuracy_norm"]
    assert choice["acc_stderr,none"] == pytest.approx(ours["accuracy_stderr"])
    assert writing["exact_match,none"] == pytest.approx(sum(i % 4 > 0 for i in range(14)) / 14)


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore")
def test_the_result_is_a_table_of_as_many_examples_as_asked(harness, whole, folder, capsys):
    tasks = ["--lm_eval", "own_choice", "--include_path", str(folder), "--limit", "2"]
    validate.main(["--run", str(whole), *tasks])
    first, *table = capsys.readouterr().out.splitlines()
    assert first == "step 6"
    assert table[0].startswith("|  Tasks   |") and any("|acc_norm|" in line for line in table)


@pytest.mark.huggingface
def test_choices_have_the_likelihood_that_questions_have(asked, known):
    found = asked.loglikelihood(of(*((q["prompt"], c) for q in ASKED for c in q["choices"])), True)
    config, declared, mesh, w, tokenizer, *_ = known
    given = [questions.Question(**q) for q in ASKED]
    ours = questions.answered(config, declared, mesh, w, given, tokenizer)["log_likelihoods"]
    assert [score for score, _ in found] == pytest.approx(
        [score for scores in ours for score in scores], rel=1e-5
    )


@pytest.mark.huggingface
def test_texts_begin_as_documents_of_the_training_data_do(harness, known):
    asked, encode = harness.Model(*known[:-1], [7]), known[4].encode_ordinary
    found = asked.loglikelihood(of(("def", " f"), ("", "import os")), True)
    pairs = [([7, *encode("def")], encode(" f")), ([7], encode("import os"))]
    assert [score for score, _ in found] == asked.scores(pairs)[0].tolist()
    assert asked.loglikelihood_rolling(of(("import os",)), True) == [found[1][0]]


@pytest.mark.huggingface
def test_what_the_model_would_say_is_greedy_and_nothing_else_is(asked, known, texts):
    prompt = asked.tok_encode("def")
    writer = asked.writer()
    writer.start([0], 0)
    said = [int(new_B[0]) for new_B in writer.write(asked.ready, [prompt], 4)]
    others = [[*said[:i], said[i] + 1, *said[i + 1 :]] for i in range(4)]
    found = asked._loglikelihood_tokens([(None, prompt, ids) for ids in (said, *others)])
    assert [greedy for _, greedy in found] == [True, False, False, False, False]
    assert texts[1].startswith(known[4].decode(said))


@pytest.mark.huggingface
def test_a_text_ends_before_the_first_of_its_stops(asked, texts):
    stops = [text[2:4] for text in texts]
    requests = [
        (word, GREEDY | {"until": [stop, "never"]}) for word, stop in zip(WORDS, stops, strict=True)
    ]
    found = asked.generate_until(of(*requests[::-1]))[::-1]  # each its own, in the order asked
    assert found == [text.split(stop)[0] for text, stop in zip(texts, stops, strict=True)]


@pytest.mark.huggingface
def test_a_prompt_that_is_too_long_loses_its_start(asked, known):
    words = " ".join(WORDS * 9)
    kept = known[4].decode(asked.tok_encode(words)[-(32 - 6) :])
    one, other = asked.generate_until(of((words, GREEDY), (kept, GREEDY)))
    assert one == other


@pytest.mark.huggingface
def test_every_token_of_a_long_text_is_counted_once(asked):
    short, long = " ".join(WORDS[:9]), " ".join(WORDS * 9)
    assert len(asked.tok_encode(short)) <= 32 < len(asked.tok_encode(long))
    [[whole, _]] = asked.loglikelihood(of(("", short)), True)
    found = asked.loglikelihood_rolling(of((short,), (long,), ("",)))
    assert found[0] == pytest.approx(whole, rel=1e-5)
    assert found[1] < found[0] and found[2] == 0
    pairs = list(asked.windows(asked.tok_encode(long)))
    assert [token for _, text in pairs for token in text] == asked.tok_encode(long)
    assert {len(context) + len(text) for context, text in pairs} == {33}


@pytest.mark.huggingface
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GREEDY | {"do_sample": True, "temperature": 1.0}, "a task asks for drawn text"),
        ({"until": []}, r"asks for 256 tokens .* trained on 32 .*max_gen_toks: 16"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(asked, settings, message):
    with pytest.raises(ValueError, match=message):
        asked.generate_until(of(("def", settings)))


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_refused(harness, whole, folder):
    tasks = ["--lm_eval", "own_choice,no_such", "--include_path", str(folder)]
    with pytest.raises(ValueError, match="--lm_eval no_such is no task"):
        validate.main(["--run", str(whole), *tasks])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lm_eval", "a"], "needs the package lm_eval, .* -r requirements-hf.txt"),
        (["--lm_eval", "a", "--questions", "b"], "are two validations"),
        (["--limit", "3"], "are for --lm_eval"),
        (["--lm_eval", "a", "--limit", "0"], "--limit 0 leaves no example"),
    ],
)
def test_flags_that_lead_nowhere_are_refused(flags, message, whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    with pytest.raises(ValueError, match=message):
        validate.main(["--run", str(whole), *flags])
