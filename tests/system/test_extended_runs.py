"""A run that is extended from before its decay ends with the bits of a longer one."""

import numpy as np
import pytest

import checkpoint
from runtime import cli
from tiny_run import arrays, losses, start
from utils import ConfigError

WSD = """
--optimizer.schedule wsd --optimizer.warmup_steps 1 --optimizer.min_lr_ratio 0
--optimizer.decay_share 0.5 --checkpoint.every_steps 2 --checkpoint.keep 9 --eval.sequences 0
--sample.prompts
"""


def of_steps(steps):
    """Flags of a wsd run, whose second half decays."""
    return [*WSD.split(), "--train.steps", f"{steps}", "--optimizer.schedule_steps", f"{steps}"]


def test_a_wsd_run_is_extended_from_before_its_decay_with_the_bits_of_a_longer_run(
    data, runs, tmp_path, monkeypatch
):
    decayed = start(data, runs, "decayed", *of_steps(6))
    with pytest.raises(ConfigError, match=r"optimizer.schedule_steps 6 -> 10.*--run.init_from"):
        start(data, runs, "decayed", *of_steps(10))
    whole = start(data, tmp_path, "whole", *of_steps(10))
    options = f"--run.init_from {decayed} --run.init_from_step 2 --run.init_optimizer"
    options = [*of_steps(10), *options.split()]

    def fail(self, step, *arguments, **named):
        raise ConfigError(f"step {step} is not saved")

    with monkeypatch.context() as patch:  # as killed before the first save
        patch.setattr(checkpoint.Checkpoints, "save", fail)
        with pytest.raises(ConfigError, match="step 4 is not saved"):
            start(data, tmp_path, "longer", *options)
    assert len(losses(tmp_path / "longer")) == 2
    longer = start(data, tmp_path, "longer", *options)
    assert losses(longer) == losses(whole)[2:]
    assert cli.load(longer / "config.toml").optimizer.schedule_steps == 10
    for one, other in zip(arrays(longer, 10), arrays(whole, 10), strict=True):
        np.testing.assert_array_equal(one, other)
