"""The test of problem 6.3."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
from answers import assigned

answer = check.load_answer()
rng = random.Random(0)
for _ in range(30):
    experts, K, tokens = rng.randint(2, 8), rng.randint(1, 2), rng.randint(1, 20)
    capacity = rng.randint(1, 6)
    choices = [rng.sample(range(experts), K) for _ in range(tokens)]
    true, found = assigned(choices, experts, capacity), answer.assign(choices, experts, capacity)
    if [list(one) for one in found] != true:
        print(f"not right: {experts} experts, capacity {capacity}, choices {choices}.")
        print(f"The slots are {true}, and yours {found}.")
        sys.exit(1)
    early = answer.assign(choices[: tokens // 2], experts, capacity)
    if list(early) != list(found)[: tokens // 2]:
        print("not right: late tokens change the slots of early ones.")
        sys.exit(1)
print("right: 30 sequences, and no late token changes an early one.")
