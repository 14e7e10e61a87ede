"""Multiple-choice questions: the likelihood of choices against the one-device reference."""

import json
import math

import jax
import numpy as np
import pytest

import reference
import validate
from common import canonical
from data.tokenizer import encode_continuation, load_tokenizer
from hf_run import write_sentencepiece
from inference import multiple_choice
from tiny_run import load

QUESTIONS = [
    {"prompt": "import", "choices": [" os", " jax.numpy as jnp", " self"], "answer": 1},
    {"prompt": "", "choices": ["def", "class A:\n    pass"], "answer": 0},
    {"prompt": "x = 1\n" * 30, "choices": ["return", "for i in range(9):"], "answer": 0},
]


@pytest.fixture(scope="module")
def loaded(whole):
    """(config, declared, mesh, weights, canonical tree of weights) of the run's checkpoint."""
    config, *others, w = load(whole)
    return config, *others, w, canonical(config, w)


@pytest.fixture(scope="module")
def expected(loaded):
    """log p of each choice in the reference, one text at a time."""
    config, *_, tree = loaded
    tokenizer = load_tokenizer("sample")
    run = jax.jit(lambda batch: reference.loss(tree, batch, config.model)[1]["cross_entropy"])

    def score(prompt, choice):
        text = tokenizer.encode_ordinary(choice)
        ids = [*(tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]), *text][-33:]
        batch = {name: np.zeros((1, 32), np.int32) for name in ("tokens", "targets", "segments")}
        batch["loss_weights"] = np.zeros((1, 32), np.float32)
        end = len(ids) - 1
        batch["tokens"][0, :end], batch["targets"][0, :end] = ids[:-1], ids[1:]
        batch["loss_weights"][0, max(0, end - len(text)) : end] = 1
        return -float(run(batch)) * batch["loss_weights"].sum()

    return [[score(q["prompt"], choice) for choice in q["choices"]] for q in QUESTIONS]


def test_choices_have_the_likelihood_of_the_reference(expected, tmp_path, whole, capsys):
    """21 choices, 8 in a pass."""
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(json.dumps(q) for q in QUESTIONS * 3) + "\n\n")
    capsys.readouterr()
    flags = ["--questions", str(file), "--json", "--train.microbatches", "2"]
    validate.main(["--run", str(whole), *flags])
    found = json.loads(capsys.readouterr().out)  # progress goes to standard error
    assert (found["questions"], found["step"]) == (9, 6)
    for ours, theirs in zip(found["log_likelihoods"], expected * 3, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    right = [int(np.argmax(s)) == q["answer"] for s, q in zip(expected, QUESTIONS, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    first, *rest = multiple_choice.report(found, "asked.jsonl")
    assert first == "step 6 on 9 questions of asked.jsonl"
    assert [line.split()[0] for line in rest] == ["accuracy", "normalised"]


def test_a_greedy_text_is_recognized(loaded):
    config, declared, mesh, w, tree = loaded
    context, text = [7, 300], []
    run = jax.jit(lambda row: reference.logits(tree, row, config.model))
    for _ in range(3):
        row = np.array([[*context, *text, 0, 0, 0][:5]], np.int32)
        text.append(int(run(row)[0, 1 + len(text)].argmax()))
    others = [[*text[:i], text[i] ^ 1, *text[i + 1 :]] for i in range(3)]
    pairs = [(context, one) for one in (text, *others)]
    found = multiple_choice.log_likelihoods(config, declared, mesh, w, pairs)[1]
    assert found.tolist() == [True, False, False, False]


def test_a_prompt_begins_as_documents_of_the_training_data_do(tmp_path):
    write_sentencepiece(tmp_path / "pieces", "segment")
    tokenizer, asked = load_tokenizer(str(tmp_path / "pieces")), []

    def scores(pairs):
        asked.extend(pairs)
        return np.zeros(2), None

    questions = [multiple_choice.Question(prompt, [" a"], 0) for prompt in ("def", "")]
    multiple_choice.evaluate(scores, questions, tokenizer, [7])
    first, after = tokenizer.encode_ordinary(" a"), encode_continuation(tokenizer, " a")
    assert first != after  # SentencePiece puts a space before a text
    assert asked == [([7, *tokenizer.encode_ordinary("def")], after), ([7], first)]


def test_a_choice_is_normalised_by_its_bytes():
    scores = lambda pairs: (np.array([-4.0, -3.3]), None)  # noqa: E731
    question = multiple_choice.Question("a", ["\u00e9\u00e9", "abc"], 0)
    found = multiple_choice.evaluate(scores, [question], load_tokenizer("sample"))
    assert (found["accuracy"], found["accuracy_norm"]) == (0, 1)


def test_the_standard_error_is_that_of_a_mean():
    p, error = multiple_choice.accuracy([True, True, False, False, False])
    assert p == 0.4
    assert error == pytest.approx(np.std([1, 1, 0, 0, 0], ddof=1) / math.sqrt(5))
    assert multiple_choice.accuracy([True]) == (1.0, None)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": "a", "choices": ["b", "c"]}',
        '{"prompt": "a", "choices": ["b"], "answer": 0}',
        '{"prompt": "", "choices": ["b", ""], "answer": 0}',
        '{"prompt": "a", "choices": ["b", "c"], "answer": 2}',
    ],
)
def test_an_invalid_line_is_named_and_a_file_without_questions_is_refused(line, tmp_path):
    with pytest.raises(ValueError, match=r"asked.jsonl cannot be read"):
        multiple_choice.read_questions(file := tmp_path / "asked.jsonl")
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"is empty\. Write a question in each line"):
        multiple_choice.read_questions(file)
    file.write_text(json.dumps(QUESTIONS[0]) + "\n" + line)
    with pytest.raises(ValueError, match="line 2 is not a question"):
        multiple_choice.read_questions(file)
