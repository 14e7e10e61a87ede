"""Blocks that the guide quotes are marked `# guide: name` ... `# guide: end`."""

import re

import pytest

from conftest import ROOT


def quoted(text):
    """{name: lines} of each marked block; raises ValueError where marks do not pair up."""
    blocks, name, start = {}, None, 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        mark = re.fullmatch(r"\s*# guide: (\w+)", line)
        if not mark:
            continue
        if (mark[1] == "end") != (name is not None) or mark[1] in blocks:
            raise ValueError(f"line {number}: {line.strip()} does not pair up")
        if mark[1] == "end":
            blocks[name] = lines[start : number - 1]
            name = None
        else:
            name, start = mark[1], number
    if name is not None:
        raise ValueError(f"{name} has no end")
    return blocks


def test_every_block_that_the_guide_quotes_begins_ends_and_is_there_once():
    found = [name for path in sorted(ROOT.glob("*.py")) for name in quoted(path.read_text())]
    assert len(found) == len(set(found))
    assert {"weights", "attention", "mlp", "moe", "loss", "step", "batch", "permute"} <= set(found)


@pytest.mark.parametrize(
    "text",
    ["# guide: a\n", "# guide: end\n", "# guide: a\n# guide: b\n# guide: end\n"],
)
def test_a_mark_without_its_partner_is_found(text):
    with pytest.raises(ValueError, match=r"does not pair up|has no end"):
        quoted(text)
