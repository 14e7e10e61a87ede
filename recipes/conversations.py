"""Write conversations about Python's standard library, from its docstrings.

    ./run.sh python recipes/conversations.py data/laptop/conversations

In the folder, heldout.jsonl has other functions than train.jsonl.
"""

import ast
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.settings import Prepare, in_validation
from data.sources import STDLIB, open_source
from runtime import jsonl

HELDOUT_SHARE = 0.1


def main() -> None:
    out, rows = Path(*sys.argv[1:]), {"train": [], "heldout": []}
    for part in itertools.chain(*open_source(Prepare(source=STDLIB, out="")).splits):
        module = part.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(Path(part.path).read_bytes()).body:
            if not isinstance(node, ast.FunctionDef) or not (text := ast.get_docstring(node)):
                continue
            name, answer = f"{module}.{node.name}", " ".join(text.split("\n\n")[0].split())
            signature = f"{name}({ast.unparse(node.args)})"
            rows["heldout" if in_validation(name, 0, HELDOUT_SHARE) else "train"] += [
                {"prompt": f"What does {name} do?", "answer": answer},
                {"prompt": f"What is the signature of {name}?", "answer": signature},
            ]
    out.mkdir(parents=True, exist_ok=True)
    for subset, conversations in rows.items():
        jsonl.write(out / f"{subset}.jsonl", conversations)


if __name__ == "__main__":
    main()
