"""benchmark.py peer with a model that takes seconds, and trainers of known times."""

import dataclasses
import importlib.util
import os
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from benchmarks import peer
from benchmarks.common import reference_config, with_values
from hf.families import LLAMA
from hf.model_config import kind_of, unsupported


def small(config, **others):
    model = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "num_attention_heads": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 0,
        "kv_lora_rank": 32,
        "compute_dtype": "float32",
    } | others
    config = with_values(config, model=model)
    return with_values(config, train={"global_batch_size": 2, "seq_len": 32, "microbatches": 2})


def test_no_turns_are_refused():
    with pytest.raises(ValueError, match="--turns 0 leaves nothing to measure"):
        peer.main(["--turns", "0"])


def test_missing_packages_are_reported_with_the_command_that_installs_them(monkeypatch):
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


@pytest.mark.slow
@pytest.mark.huggingface
@pytest.mark.parametrize(("name", "theirs"), [("moe", "DeepseekV3"), ("llama", "Llama")])
def test_both_train_in_turns_from_the_same_first_loss(monkeypatch, capsys, name, theirs):
    """In one process, which saves the start of others."""
    trainers = []

    class InThisProcess(peer.TrainerProcess):
        def __init__(self, make, *arguments):
            self.trainer = make(*arguments)
            trainers.append(self.trainer)
            self.name, self.first_loss = self.trainer.name, self.trainer.first_loss
            self.ready_s, self.dropped = self.trainer.ready_s, self.trainer.dropped

        def turn(self):
            return self.trainer.step()

        def close(self):
            pass

    others = {"first_k_dense_replace": 1} if name == "moe" else {}
    config = small(peer.config_of_both(name), **others)
    monkeypatch.setattr(peer, "TrainerProcess", InThisProcess)
    peer.compare(config, peer.Flags(turns=2, compile=False))
    text = capsys.readouterr().out
    assert "this project over the better of the others: " in text
    assert f"{theirs}ForCausalLM, eager" in text and "2 x 32 tokens" in text
    for trainer in trainers:
        assert trainer.last_loss < trainer.first_loss and np.isfinite(trainer.last_loss)


def test_the_ratio_is_that_of_each_turn_over_the_better_of_the_others():
    seconds = np.array([[1.0, 4.0, 3.0], [2.0, 4.0, 3.0], [3.0, 1.0, 3.0]])
    assert peer.over_the_better(seconds) == [3.0, 1.5, 1.0]


@dataclasses.dataclass
class Trained:
    """Instead of a trainer. The time of its step is the number of its process."""

    first_loss: float
    name: str = "theirs"
    ready_s: float = 0.0
    dropped: float = 0.0
    error: str = ""

    def step(self):
        if self.error == "killed":
            os._exit(3)
        if self.error:
            raise ValueError(self.error)
        return float(os.getpid())


def test_different_first_losses_are_refused():
    peer.check_first_losses([Trained(8.31, "ours"), Trained(8.32)])
    message = r"first loss of ours is 8.3100 and that of theirs 8.4000: weights or tokens"
    with pytest.raises(ValueError, match=message):
        peer.check_first_losses([Trained(8.31, "ours"), Trained(8.32), Trained(8.40)])


@pytest.mark.slow
def test_each_trainer_has_a_process_that_ends_with_it():
    one, other = peer.TrainerProcess(Trained, 1.0, "a"), peer.TrainerProcess(Trained, 2.0, "b")
    assert (one.name, one.first_loss, other.name) == ("a", 1.0, "b")
    ids = [trainer.turn() for trainer in (one, other, one)]
    one.close(), other.close()
    assert ids[0] == ids[2] and len({*ids, float(os.getpid())}) == 3
    for number in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


@pytest.mark.parametrize(
    ("how", "error"), [("out of memory", ValueError), ("killed", BrokenProcessPool)]
)
def test_an_error_of_a_trainer_is_raised_and_so_is_its_death(how, error):
    one = peer.TrainerProcess(Trained, 1.0, "a", 0.0, 0.0, how)
    with pytest.raises(error, match="out of memory" if how != "killed" else "terminated"):
        one.turn()
    one.close()
