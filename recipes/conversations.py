"""Write conversations about Python's standard library, from its docstrings.

    ./run.sh python recipes/conversations.py --out data/laptop/conversations

Writes OUT/train.jsonl and OUT/heldout.jsonl, in which other functions are asked about.
"""

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.settings import Prepare, in_validation
from data.sources import STDLIB, open_source
from runtime import cli, errors, jsonl


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Write conversations about Python's standard library, from its docstrings."""

    out: Path  # folder for train.jsonl and heldout.jsonl
    heldout_share: float = 0.1  # of the functions


def functions(body: list[ast.stmt], name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the public functions and methods of a module or a class, with their names."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body, f"{name}.{node.name}")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{name}.{node.name}", node


def main() -> None:
    flags = cli.parse_flags(Flags)
    rows: dict[str, list] = {"train": [], "heldout": []}
    for part in itertools.chain(*open_source(Prepare(source=STDLIB, out="")).splits):
        module = part.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, node in functions(ast.parse(Path(part.path).read_bytes()).body, module):
            if text := ast.get_docstring(node):
                answer = " ".join(text.split("\n\n")[0].split())
                signature = f"{name}({ast.unparse(node.args)})"
                subset = "heldout" if in_validation(name, 0, flags.heldout_share) else "train"
                rows[subset] += [
                    {"prompt": f"What does {name} do?", "answer": answer},
                    {"prompt": f"What is the signature of {name}?", "answer": signature},
                ]
    flags.out.mkdir(parents=True, exist_ok=True)
    for subset, own in rows.items():
        jsonl.write(flags.out / f"{subset}.jsonl", own)
        print(f"{flags.out}/{subset}.jsonl: {len(own):,} conversations")


if __name__ == "__main__":
    errors.run_command(main)
