"""benchmark.py peer without PyTorch: the model of both, their first losses and the ratio."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import peer
from benchmarks.common import reference_config
from hf.families import LLAMA
from hf.model_config import kind_of, unsupported


def test_no_turns_and_missing_packages_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="--turns 0 leaves nothing to measure"):
        peer.main(["--turns", "0"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -r requirements-hf\.txt"):
        peer.main([])


def test_the_model_is_that_of_the_reference_in_an_order_that_transformers_has():
    ours, theirs = reference_config().model, peer.config_of_both("moe").model
    assert not unsupported(theirs) and unsupported(ours)
    differ = {n for n, v in vars(theirs).items() if v != getattr(ours, n)}
    assert differ == {"first_k_dense_replace", "decoder_sparse_step"}
    llama = peer.config_of_both("llama").model
    assert not unsupported(llama) and kind_of(llama) == LLAMA


def test_the_ratio_is_that_of_each_turn_over_the_better_of_the_others():
    seconds = np.array([[1.0, 4.0, 3.0], [2.0, 4.0, 3.0], [3.0, 1.0, 3.0]])
    assert peer.over_the_better(seconds) == [3.0, 1.5, 1.0]


def test_different_first_losses_are_refused():
    ours, near, far = (
        SimpleNamespace(name=name, first_loss=loss)
        for name, loss in (("ours", 8.31), ("theirs", 8.32), ("theirs", 8.40))
    )
    peer.check_first_losses([ours, near])
    message = r"first loss of ours is 8.3100 and that of theirs 8.4000: weights or tokens"
    with pytest.raises(ValueError, match=message):
        peer.check_first_losses([ours, near, far])
