"""The test of problem 1.4."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
from answers import line_starts

answer = check.load_answer()
rng = random.Random(0)
for _ in range(50):
    lines = [b"x" * rng.randrange(6) + b"\n" for _ in range(20)]
    content = b"".join(lines)
    begins = [0, *sorted(rng.sample(range(1, len(content)), 4))]
    starts = line_starts(content, begins)
    first = 0
    for line in lines:
        # The reader of a split reads from its start to that of the next split.
        true = max(i for i, start in enumerate(starts) if start <= first)
        found = answer.owner(first, begins)
        if found != true:
            print(f"not right: splits begin at {begins}. The line at byte {first} is read by split")
            print(f"{true}, and you return {found}.")
            sys.exit(1)
        first += len(line)
print("right: 50 files.")
