"""A model from one number: the settings that a depth gives, and those that it leaves."""

import jax
import pytest

import dataset
import depth
import fit
import main
import model
import utils
import weights
from devices import chips
from runtime import cli

KINDS = ([], ["--dense"])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3, 12, 25])
def test_the_size_grows_as_the_cube_of_the_depth_and_the_tokens_with_it(layers, kind):
    config = depth.parse(["--depth", str(layers), *kind, "--model.vocab_size", "256"])
    one = utils.changed(config, {"mesh": utils.Mesh(fsdp=1, pipeline=1, tensor=1)})
    _, active = weights.count(model.declare(one))
    active -= 256 * config.model.hidden_size  # the embedding
    rounding = 0.05 if layers >= 12 else 0.5 / layers
    assert active == pytest.approx(51_200 * layers**3, rel=rounding)
    t = config.train
    tokens = t.steps * t.global_batch_size * t.seq_len
    assert tokens == pytest.approx(depth.TOKENS_PER_PARAMETER * 51_200 * layers**3, rel=1e-3)
    o = config.optimizer
    assert o.lr * o.weight_decay * t.steps == pytest.approx(depth.DECAY, rel=0.05)
    assert bool(config.model.moe_layers) == (layers > 1 and not kind)


def test_what_is_set_is_kept_and_the_rest_follows_from_it(tmp_path):
    usual = depth.parse(["--depth", "4"])
    words = "--optimizer.name adamw --train.steps 100 --train.seq_len=128 --model.dropout 0.1"
    made = depth.parse(["--depth=4", *words.split()])
    o = made.optimizer
    assert (o.name, made.train.steps, made.train.seq_len) == ("adamw", 100, 128)
    assert o.lr < usual.optimizer.lr and o.warmup_steps == 5
    assert o.weight_decay == pytest.approx(depth.DECAY / (100 * o.lr), rel=0.05)
    assert made.train.global_batch_size == 4 * usual.train.global_batch_size, "equal tokens"
    assert made.model == utils.changed(
        usual.model, {"dropout": 0.1, "router_bias_update_speed": 0.01}
    )
    file = tmp_path / "own.toml"
    file.write_text('depth = 4\ndense = true\n[model]\nhidden_size = 192\n[run]\nname = "own"\n')
    made = depth.parse(["--config", str(file)])
    assert (made.model.hidden_size, made.model.moe_layers, made.run.name) == (192, 0, "own")
    assert made.optimizer.lr > usual.optimizer.lr, "the learning rate is that of the width"
    assert depth.parse(["--config", str(file), "--depth", "6"]).model.num_hidden_layers == 6
    with pytest.raises(ValueError, match="--depth is for main"):
        cli.parse(["--config", str(file)])
    with pytest.raises(ValueError, match="unknown key dense"):
        cli.load(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--depth 0", "--depth 0 is out of range. Use a number from 1 to"),
        ("--depth 1000", "--depth 1000 is out of range"),
        ("--depth x", "--depth x is not a number of layers. Use --depth 12"),
        ("--depth", "is not a number of layers"),
        ("--dense", "--dense goes with --depth. Use --depth 12 --dense"),
    ],
)
def test_a_wrong_depth_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        depth.parse(words.split())


@pytest.mark.parametrize("layers", [2, 6, 12])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_depth_has_a_mesh_on_any_number_of_devices(layers, count):
    config = main.parse(["--depth", str(layers), "--model.vocab_size", "4096"])
    made, text = fit.for_devices(config, chips("cpu", count))
    assert fit.why_not(made) is None and "chosen: --mesh.fsdp " in text
    used = jax.numpy.prod(jax.numpy.array(made.mesh.shape))
    assert used == count or "the others stay idle" in text


def test_the_vocabulary_is_that_of_the_data(data, tmp_path, monkeypatch, capsys):
    words = ["--depth", "2", *data, "--run.dir", str(tmp_path)]
    assert main.parse(words).model.vocab_size == 0
    assert dataset.with_vocabulary(main.parse(words)).model.vocab_size == 4096
    kept = main.parse([*words, "--model.vocab_size", "5000"])
    assert dataset.with_vocabulary(kept).model.vocab_size == 5000
    monkeypatch.setattr("sys.argv", ["main.py", *words, "--print_config"])
    main.main()
    text = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(text)
    printed = cli.load(tmp_path / "printed.toml")
    assert printed.model.vocab_size == 4096 and printed.model.hidden_size == 128
    assert not utils.left_open(printed) and text.startswith("# chosen: --mesh.fsdp")
    assert not (tmp_path / "depth-2").exists()


def test_the_learning_rate_is_the_measured_one_and_falls_as_1_over_width_beyond():
    def lr(width, name="muon", steps=128, batch=16):
        values = {"optimizer.name": name, "model.hidden_size": width}
        values |= {"train.steps": steps, "train.global_batch_size": batch, "train.seq_len": 256}
        return depth.best_lr(utils.changed(utils.Config(), values))

    assert lr(384) == 0.010 and lr(768) == 0.005  # docs/experiments.md
    assert lr(128) == pytest.approx(0.0216, rel=0.01) and lr(256) == pytest.approx(0.0133, rel=0.01)
    assert lr(160, "adamw") == 0.0040 and lr(320, "adamw") == 0.0020
    assert lr(384, steps=512) == 0.005 and lr(384, batch=64) == 0.020
    assert lr(384, steps=512, batch=64) == 0.010
    with pytest.raises(ValueError, match="No learning rate was tuned for lion"):
        lr(128, "lion")
