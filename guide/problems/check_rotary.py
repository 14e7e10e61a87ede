"""The test of problem 2.2."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
import jax.numpy as jnp
import numpy as np
from answers import config_of

import attention

answer = check.load_answer()
rng = np.random.default_rng(0)
for R, theta in ((2, 10_000.0), (8, 100.0), (64, 500_000.0)):
    m = dataclasses.replace(config_of("tiny").model, rope_theta=theta)
    x, y = rng.normal(size=(2, R)).astype(np.float32)
    for position in (0, 1, 7, 100):
        at = jnp.array([[position]])
        true = np.asarray(attention.rotate(jnp.asarray(x)[None, None, None], m, at)).ravel()
        found = np.asarray(answer.rotate(x, position, theta))
        if found.shape != x.shape or not np.allclose(found, true, atol=1e-4):
            print(
                f"not right: for R = {R}, theta = {theta:g}, position {position} the first numbers"
            )
            print(f"are {true[:4]}, and yours {found[:4]}.")
            sys.exit(1)
    scores = [
        answer.rotate(x, a, theta) @ answer.rotate(y, b, theta) for a, b in ((9, 4), (29, 24))
    ]
    if not np.isclose(*scores, atol=1e-3):
        print(f"not right: the scores at positions (9, 4) and (29, 24) differ: {scores}.")
        sys.exit(1)
print("right: 3 widths, 4 positions, and scores that depend on the distance.")
