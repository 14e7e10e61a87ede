"""benchmark.py peer with a model that takes seconds; what it is about is timed by hand."""

import dataclasses
import importlib.util
import os

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
        (["--turns", "0"], "--turns and --microbatches are counts"),
        (["--microbatches", "-1"], "--turns and --microbatches are counts"),
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
    peer.main([name, "--turns", "2", "--no-compile"])
    text = capsys.readouterr().out
    assert "this project over the better of the others: " in text
    assert f"{peer.PEERS[name][0]}, eager" in text and "2 x 32 tokens" in text


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_torch) for n in ("moe", "dense")])
def test_a_step_of_theirs_makes_the_loss_smaller(name):
    config = small(name)
    theirs = peer.Theirs(*peer.PEERS[name][:1], peer.PEERS[name][1](config), config, compile=False)
    losses = [(theirs.step(), theirs.last_loss)[1] for _ in range(5)]
    assert losses[-1] < losses[0] <= theirs.first_loss + 1e-3
    assert np.isfinite(losses).all()


def test_the_ratio_is_that_of_each_turn_over_the_better_of_the_others():
    seconds = np.array([[1.0, 4.0, 3.0], [2.0, 4.0, 3.0], [3.0, 1.0, 3.0]])
    assert peer.over_the_better(seconds) == [3.0, 1.5, 1.0]


@dataclasses.dataclass
class Trained:
    """Instead of a trainer."""

    first_loss: float
    name: str = "theirs"
    ready_s: float = 0.0
    dropped: float = 0.0
    ends: str = ""  # how its step does

    def step(self):
        if self.ends == "killed":
            os._exit(3)
        if self.ends:
            raise ValueError(self.ends)
        return float(os.getpid())


def test_first_losses_that_differ_are_refused():
    peer.same_start([Trained(8.31), Trained(8.32)])
    with pytest.raises(ValueError, match=r"8.3100 here and 8.4000 by theirs: weights or tokens"):
        peer.same_start([Trained(8.31), Trained(8.32), Trained(8.40)])


def test_each_trainer_steps_in_a_process_of_its_own_which_ends_with_it():
    with peer.Apart(Trained, 1.0, "a") as one, peer.Apart(Trained, 2.0, "b") as other:
        assert (one.name, one.first_loss, other.name) == ("a", 1.0, "b")
        ids = [trainer.turn() for trainer in (one, other, one)]
        assert ids[0] == ids[2] and len({*ids, float(os.getpid())}) == 3
    for number in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def test_what_a_trainer_raises_is_raised_here_and_one_that_is_killed_is_told():
    with pytest.raises(TypeError, match="no_such_field"):
        peer.Apart(with_field, "no_such_field")
    for how, error, message in (
        ("out of memory", ValueError, "out of memory"),
        ("killed", RuntimeError, "ended with exit code 3"),
    ):
        one = peer.Apart(Trained, 1.0, "a", 0.0, 0.0, how)
        with one, pytest.raises(error, match=message):
            one.turn()


def with_field(field):
    return Trained(1.0, **{field: 1})
