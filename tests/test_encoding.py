"""Text files are UTF-8 wherever they are read or written, whatever the locale."""

import ast
from pathlib import Path

from data.hf_tokenizer import read_settings

ROOT = Path(__file__).parent.parent
OTHERS = ("tests/", "guide/", ".venv/", ".cache/", "runs/")


def without_encoding(source: str) -> list[int]:
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
    found = {str(f): without_encoding(f.read_text(encoding="utf-8")) for f in files}
    assert files and not {name: lines for name, lines in found.items() if lines}
    for call in ("open(p)", "p.read_text()", "p.open('w')", "p.write_text(t)"):
        assert without_encoding(call) == [1]


def test_settings_of_a_tokenizer_are_read_as_utf_8(tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes('{"eos_token": "<fin du texte, été>"}'.encode())
    assert read_settings(file) == {"eos_token": "<fin du texte, été>"}
