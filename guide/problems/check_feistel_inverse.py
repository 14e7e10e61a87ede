"""The test of problem 5.4."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
import numpy as np
from answers import ROOT  # puts the project on the path

from dataset import feistel, mix

assert ROOT
answer = check.load_answer()
BITS = 4
for key in (1, 2**40 + 7, 2**63 + 12345):

    def hashed(x: int, key: int = key) -> int:
        return int(mix(np.array([x], np.uint64) ^ np.uint64(key))[0]) & ((1 << BITS) - 1)

    for value in range(1 << 2 * BITS):
        before = value >> BITS, value & ((1 << BITS) - 1)
        after = int(feistel(np.array([value], np.uint64), BITS, [np.uint64(key)])[0])
        pair = after >> BITS, after & ((1 << BITS) - 1)
        found = tuple(int(x) for x in answer.inverse(*pair, hashed))
        if found != before:
            print(f"not right: a round maps {before} to {pair}, and you return {found} for {pair}.")
            sys.exit(1)
print("right: 3 keys, 256 pairs each.")
