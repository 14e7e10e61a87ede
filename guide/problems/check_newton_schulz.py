"""The test of problem D.4."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
import jax.numpy as jnp
import numpy as np
from answers import optimizer

answer = check.load_answer()
rng = np.random.default_rng(0)
for rows, columns in ((1, 1), (3, 5), (16, 16), (20, 64)):
    x = rng.normal(size=(rows, columns))
    true = np.asarray(optimizer.orthogonalize(jnp.asarray(x, jnp.float32)[None]))[0]
    found = np.asarray(answer.orthogonalize(x))
    if found.shape != x.shape or not np.allclose(found, true, atol=1e-3):
        print(f"not right: of a {rows} x {columns} matrix, the first row begins with")
        print(f"{true[0, :4]}, and yours with {found[0, :4]}.")
        sys.exit(1)
    values = np.linalg.svd(found, compute_uv=False)
    large = np.linalg.svd(x / np.linalg.norm(x), compute_uv=False) > 0.01
    if not ((values[large] > 0.6) & (values[large] < 1.3)).all():
        print(f"not right: singular values are {values}.")
        sys.exit(1)
print("right: 4 matrices, and their singular values.")
