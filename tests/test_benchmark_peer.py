"""benchmark.py peer with a model that takes seconds; what it is about is timed by hand."""

import dataclasses
import importlib.util

import numpy as np
import pytest

import benchmark_peer as peer
from benchmark import with_values

HAS_TORCH = all(map(importlib.util.find_spec, ("torch", "transformers")))
needs_torch = [
    pytest.mark.huggingface,
    pytest.mark.skipif(not HAS_TORCH, reason="needs requirements-hf.txt"),
]


def small(name, **model):
    config = peer.CONFIGS[name](0)
    sizes = {"width": 64, "hidden": 128, "blocks": 1, "vocabulary": 256, "heads": 2}
    if name == "moe":
        sizes |= {"expert_hidden": 32, "prefix_layers": 1, "q_lora_rank": 0, "kv_lora_rank": 32}
    config = with_values(config, model=sizes | {"compute_dtype": "float32"} | model)
    return with_values(config, train={"sequences": 2, "sequence_length": 32, "microbatches": 2})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["mo"], "mo is no model: use moe or dense"),
        (["--steps", "0"], "--steps and --microbatches are counts"),
        (["--microbatches", "-1"], "--steps and --microbatches are counts"),
    ],
)
def test_bad_input_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        peer.main(flags)


def test_without_its_packages_the_way_to_get_them_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -r requirements-hf\.txt"):
        peer.main([])


def test_the_experts_are_those_of_the_reference_in_an_order_that_transformers_has():
    from benchmark import reference_config
    from hugging_face import obstacles

    ours, theirs = reference_config().model, peer.moe(0).model
    assert not obstacles(theirs) and obstacles(ours)
    assert theirs.layers == ours.layers
    differ = {n for n, v in vars(theirs).items() if v != getattr(ours, n)}
    assert differ == {"prefix_layers", "dense_layers"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_torch) for n in ("moe", "dense")])
def test_both_train_in_turns(name, monkeypatch, capsys):
    config = small(name)
    monkeypatch.setitem(peer.CONFIGS, name, lambda _: config)
    peer.main([name, "--steps", "2", "--no-compile"])
    text = capsys.readouterr().out
    assert "this project over the better of the others: " in text
    assert f"{peer.PEERS[name][0]}, eager" in text and "2 x 32 tokens" in text


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_torch) for n in ("moe", "dense")])
def test_a_step_of_theirs_makes_the_loss_smaller(name):
    config = small(name)
    theirs = peer.Theirs(*peer.PEERS[name][:1], peer.PEERS[name][1](config), config, compile=False)
    losses = [theirs.step()[1] for _ in range(5)]
    assert losses[-1] < losses[0] <= theirs.first_loss + 1e-3
    assert np.isfinite(losses).all()


def test_the_ratio_is_that_of_each_turn_over_the_better_of_the_others():
    seconds = np.array([[1.0, 4.0, 3.0], [2.0, 4.0, 3.0], [3.0, 1.0, 3.0]])
    assert peer.over_the_better(seconds) == [3.0, 1.5, 1.0]


@dataclasses.dataclass
class Trained:
    first_loss: float
    name: str = "theirs"


def test_first_losses_that_differ_are_refused():
    peer.same_start(8.31, [Trained(8.32)])
    with pytest.raises(ValueError, match=r"8.3100 here and 8.4000 by theirs: weights or tokens"):
        peer.same_start(8.31, [Trained(8.32), Trained(8.40)])
