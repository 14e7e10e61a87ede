"""The test of problem C.4."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check

answer = check.load_answer()
for save_s, failure_s in ((5.0, 21_600.0), (1.0, 3600.0), (60.0, 86_400.0)):
    best = math.sqrt(2 * save_s * failure_s)
    lost = answer.lost_share(best, save_s, failure_s)
    if not math.isclose(lost, math.sqrt(2 * save_s / failure_s), rel_tol=1e-6):
        print(
            f"not right: saves of {save_s} s, failures every {failure_s} s, interval {best:.0f} s:"
        )
        print(f"the share is {math.sqrt(2 * save_s / failure_s):.4f}, and you return {lost:.4f}.")
        sys.exit(1)
    near = [answer.lost_share(best * factor, save_s, failure_s) for factor in (0.5, 0.9, 1.1, 2)]
    if min(near) <= lost:
        print("not right: the share is smallest at sqrt(2 * save_s * failure_s), and not in yours.")
        sys.exit(1)
print("right: 3 cases.")
