"""lm-evaluation-harness on tasks of local files."""

import json
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest

import checkpoint
import inference
import model
import train
import validate
from data.tokenizer import text_tokens
from inference import multiple_choice
from runtime import resume, run_directory

WORDS = ["import", "def", "class", "return", "self", "None", "True", "for", "if", "else"]
WORDS += ["while", "with", "try", "print"]
QUESTIONS = [
    {"prompt": prompt, "choices": [f" {word}" for word in WORDS[i : i + 3]], "answer": i % 3}
    for i, prompt in enumerate([*WORDS[:10], "x = 1\n" * 30 + "y"])
]
TASK = """
task: own_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: prompt
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """output_type: generate_until
doc_to_target: target
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
GREEDY = {"until": [], "max_gen_toks": 6}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lm_eval", "a"], "needs lm_eval, .* -r requirements-hf.txt"),
        (["--lm_eval", "a", "--questions", "b"], "each is an evaluation. Give one"),
        (["--core", "--questions", "b"], "each is an evaluation. Give one"),
        (["--core"], "--core needs lm_eval, .* -r requirements-hf.txt"),
        (["--limit", "3"], "need --lm_eval"),
        (["--lm_eval", "a", "--limit", "0"], "--limit 0 is out of range"),
    ],
)
def test_conflicting_flags_are_refused(flags, message, whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "inference.lm_eval_adapter", raising=False)
    monkeypatch.delattr(inference, "lm_eval_adapter", raising=False)
    with pytest.raises(ValueError, match=message):
        validate.main(["--run", str(whole), *flags])


@pytest.fixture(scope="module")
def harness():
    with warnings.catch_warnings():  # of its packages
        warnings.simplefilter("ignore")
        from inference import lm_eval_adapter
    # Listing its thousands of tasks takes seconds.
    lm_eval_adapter.TaskManager = partial(lm_eval_adapter.TaskManager, include_defaults=False)
    return lm_eval_adapter


@pytest.fixture(scope="module")
def known(whole):
    """(config, mesh, weights, log_likelihoods of pairs, TextTokens) of the tiny run."""
    config = resume.config_of(run_directory.at(whole), [], validate.Flags)
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    _, w, stored = checkpoint.load_weights(run_directory.at(whole), None, shapes)
    scores = partial(multiple_choice.log_likelihoods, config, declared, mesh, w)
    return config, mesh, w, scores, text_tokens(stored["tokens"], run_directory.at(whole))


@pytest.fixture(scope="module")
def adapter(harness, known):
    return harness.Model(*known)


def of(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.fixture(scope="module")
def texts(adapter):
    """The completion of each word."""
    return adapter.generate_until(of(*((word, GREEDY) for word in WORDS)))


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore")
def test_tasks_give_the_accuracy_of_the_same_questions(harness, whole, texts, tmp_path, capsys):
    both = enumerate(zip(WORDS, texts, strict=True))
    told = [{"prompt": word, "target": text if i % 4 else "other"} for i, (word, text) in both]
    for name, yaml, rows in (("choice", CHOICE, QUESTIONS), ("writing", WRITING, told)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + yaml)

    def printed(*flags):
        capsys.readouterr()
        validate.main(["--run", str(whole), *flags])
        return capsys.readouterr().out

    where = ["--include_path", str(tmp_path), "--lm_eval"]
    ours = json.loads(printed("--json", "--questions", str(tmp_path / "choice.jsonl")))
    found = json.loads(printed("--json", *where, "own_choice,own_writing"))
    assert found["step"] == 6
    choice, writing = (found["results"][f"own_{name}"] for name in ("choice", "writing"))
    assert choice["acc,none"] == ours["accuracy"]
    assert choice["acc_norm,none"] == ours["accuracy_norm"]
    assert choice["acc_stderr,none"] == pytest.approx(ours["accuracy_stderr"])
    assert writing["exact_match,none"] == pytest.approx(sum(i % 4 > 0 for i in range(14)) / 14)
    table = printed(*where, "own_choice", "--limit", "2")
    assert table.startswith("step 6\n|  Tasks   |") and "|acc_norm|" in table
    with pytest.raises(ValueError, match="--lm_eval no_such is not a task"):
        printed(*where, "own_choice,no_such")


@pytest.mark.huggingface
def test_likelihoods_are_those_of_questions_after_the_begin_of_a_document(harness, adapter, known):
    pairs = of(*((q["prompt"], c) for q in QUESTIONS for c in q["choices"]))
    *_, scores, tokens = known
    given = [multiple_choice.Question(**q) for q in QUESTIONS]
    ours = multiple_choice.evaluate(scores, given, tokens.tokenizer)
    expected = [score for scores in ours["log_likelihoods"] for score in scores]
    found = [score for score, _ in adapter.loglikelihood(pairs, True)]
    assert found == pytest.approx(expected, rel=1e-5)

    other = harness.Model(*known[:-1], tokens._replace(begin=[7]))
    encode = tokens.tokenizer.encode_ordinary
    found = other.loglikelihood(of(("def", " f"), ("", "import os")), True)
    pairs = [([7, *encode("def")], encode(" f")), ([7], encode("import os"))]
    assert [score for score, _ in found] == other.scores(pairs)[0].tolist()
    assert other.loglikelihood_rolling(of(("import os",)), True) == [found[1][0]]


@pytest.mark.huggingface
def test_a_text_is_greedy_and_ends_before_the_first_of_its_stops(adapter, known, texts):
    prompt, generator = adapter.tok_encode("def"), adapter.generator
    generator.reset([0], 0)
    greedy = [int(new_B[0]) for new_B in generator.generate(adapter.decoding_weights, [prompt], 4)]
    others = [[*greedy[:i], greedy[i] + 1, *greedy[i + 1 :]] for i in range(4)]
    found = adapter._loglikelihood_tokens([(None, prompt, ids) for ids in (greedy, *others)])
    assert [is_greedy for _, is_greedy in found] == [True, False, False, False, False]
    assert texts[1].startswith(known[4].tokenizer.decode(greedy))
    stops = [text[2:4] for text in texts]
    both = zip(WORDS, stops, strict=True)
    requests = [(word, GREEDY | {"until": [stop, "never"]}) for word, stop in both]
    found = adapter.generate_until(of(*requests[::-1]))[::-1]  # in the order of the requests
    assert found == [text.split(stop)[0] for text, stop in zip(texts, stops, strict=True)]


@pytest.mark.huggingface
def test_a_long_prompt_loses_its_start_and_every_token_of_a_long_text_counts_once(adapter, known):
    short, long = " ".join(WORDS[:9]), " ".join(WORDS * 9)
    kept = known[4].tokenizer.decode(adapter.tok_encode(long)[-(32 - 6) :])
    one, other = adapter.generate_until(of((long, GREEDY), (kept, GREEDY)))
    assert one == other
    assert len(adapter.tok_encode(short)) <= 32 < len(adapter.tok_encode(long))
    [[whole, _]] = adapter.loglikelihood(of(("", short)), True)
    found = adapter.loglikelihood_rolling(of((short,), (long,), ("",)))
    assert found[0] == pytest.approx(whole, rel=1e-5)
    assert found[1] < found[0] and found[2] == 0
    pairs = list(adapter.windows(adapter.tok_encode(long)))
    assert [token for _, text in pairs for token in text] == adapter.tok_encode(long)


@pytest.mark.huggingface
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GREEDY | {"do_sample": True, "temperature": 1.0}, "a task requests sampling"),
        ({"until": []}, r"requests 256 tokens .* trained on 32 .*max_gen_toks: 16"),
    ],
)
def test_a_request_for_sampling_or_too_many_tokens_is_refused(adapter, settings, message):
    with pytest.raises(ValueError, match=message):
        adapter.generate_until(of(("def", settings)))
