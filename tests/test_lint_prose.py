"""The lint of prose finds long sentences and refused phrases, and passes plain text."""

import pytest

import lint_prose

GOOD = """# Title that is not a sentence

The run saves its state. It resumes with `code that has many words in it`.

- A list item is a sentence of its own
- Another item, which
  continues

1. first

```
is_told in a code block is not prose, and this_line_is_as_long_as_it_likes
```

| a table | is not measured |
|---|---|
""".replace("_", " ")
LONG = "word " * 41 + "ends."


def found(tmp_path, name, text):
    """(line, reason) of each finding in a file with this text."""
    path = tmp_path / name
    path.write_text(text)
    return [(line, reason) for _, line, reason, _ in lint_prose.findings(path)]


def test_long_sentences_are_found_in_documents_and_docstrings(tmp_path):
    text = "One two three. Four `five six\nseven` eight!\n\n- nine ten eleven\n- no"
    assert [(s.line, s.words) for s in lint_prose.sentences(text)] == [(1, 3), (1, 3), (4, 3)]
    assert found(tmp_path, "README.md", GOOD) == found(tmp_path, "page.md", GOOD) == []
    assert (3, "42 words, more than 40") in found(tmp_path, "page.md", f"# Title\n\n{LONG}\n")
    code = f'def f():\n    """Return it.\n\n    {LONG}\n    """\n'
    assert found(tmp_path, "code.py", code) == [(4, "42 words, more than 40")]
    assert found(tmp_path, "code.py", f"# {LONG}\n") == []


def test_the_mean_is_bounded_more_strictly_in_the_readme_which_has_few_long_sentences(tmp_path):
    text = f"{'word ' * 15}ends.\n"
    assert found(tmp_path, "page.md", text) == []
    [(_, reason)] = found(tmp_path, "README.md", text)
    assert reason == "16.0 words a sentence on average, more than 15"
    [(_, reason)] = found(tmp_path, "README.md", f"{'Three short words. ' * 9}{'word ' * 29}ends. ")
    assert reason == "10% of sentences above 28 words, more than 6%"


def test_phrases_are_found_in_comments_strings_and_scripts_and_not_in_code(tmp_path):
    code = "# We put\n# A.\ntext = (\n    f'{name} is '\n    'B so'\n)\nis_B, put = B, A"
    code = code.replace("A", "aside").replace("B", "told")
    assert [line for line, _ in found(tmp_path, "code.py", code)] == [4, 1]
    page = "A run\nwere\nA. M+end".replace("A.", "told.").replace("M+", "M")
    assert [line for line, _ in found(tmp_path, "page.md", page)] == [2, 3]
    script = "#!/bin/sh\n# goes on\n# from here\necho 'A it'".replace("A", "fix or m" + "end")
    assert [line for line, _ in found(tmp_path, "script.sh", script)] == [2, 4]


def test_a_finding_ends_the_command_with_1_and_is_printed_with_its_line(tmp_path, capsys):
    page = tmp_path / "page.md"
    for text, code in ((GOOD, 0), ("Good words here.\nMore words are {}.\n".format("told"), 1)):
        page.write_text(text)
        with pytest.raises(SystemExit) as ended:
            lint_prose.main([str(page)])
        assert ended.value.code == code
    assert f"{page}:2: " in capsys.readouterr().out


def test_a_line_that_was_wrapped_before_a_marker_is_found(tmp_path):
    for marker in ("-", "*", "+", ">", "1.", "##"):
        [(line, reason)] = found(tmp_path, "page.md", f"The result is `a\n{marker} b` and c.\n")
        assert line == 2 and reason == "begins a list or heading within a paragraph"
