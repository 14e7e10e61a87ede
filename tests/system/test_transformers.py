"""transformers computes our logits from exported folders, and its folders are imported exactly.

test_families.py has grouped-query models.
"""

import numpy as np
import pytest

pytestmark = [
    pytest.mark.huggingface,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import convert  # noqa: E402
import hf_case  # noqa: E402
import make_hf_reference  # noqa: E402
from hf_run import SIZES, logits, make_run, opened, stored, their_logits  # noqa: E402

T = 512
CASES = {
    "v3, no shared expert, dense layers first": {
        "n_shared_experts": 0, "dense_layers": 2, "blocks": 1, "num_experts_per_tok": 6,
    },
    "v2": {
        "scoring_func": "softmax", "norm_topk_prob": False, "qk_nope_head_dim": 10, "n_group": 4,
        "topk_group": 2, "topk_method": "group_limited_greedy", "prefix_layers": 1,
    },
}  # fmt: skip


def tokens():
    return np.random.default_rng(2).integers(0, SIZES["vocab_size"], (2, T)).astype(np.int32)


def export(run, out, *flags):
    convert.main(["export", "--run", str(run), "--out", str(out), *flags])
    return out


@pytest.mark.parametrize("name", hf_case.CASES)
def test_the_committed_logits_are_those_of_this_transformers(name):
    with np.load(hf_case.LOGITS_FILE) as file:
        found = make_hf_reference.logits(hf_case.CASES[name])
        np.testing.assert_allclose(found, file[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_an_exported_folder_are_ours(name, tmp_path):
    make_run(tmp_path / "run", **CASES[name])
    ids = tokens()
    found = opened(export(tmp_path / "run", tmp_path / "out"))
    assert type(found).__name__ == f"Deepseek{name[:2].upper()}ForCausalLM"
    np.testing.assert_allclose(their_logits(found, ids), logits(tmp_path / "run", ids), atol=1e-4)


def test_a_folder_saved_by_transformers_is_read_and_trains(tmp_path):
    make_run(tmp_path / "run", q_lora_rank=9, dense_layers=1, rope_factor=8.0)
    found = opened(export(tmp_path / "run", tmp_path / "out", "--remote_code"), own=True)
    ids = tokens()
    found.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved", own=True)
    np.testing.assert_array_equal(their_logits(again, ids), their_logits(found, ids))
    convert.main(["import", "--folder", str(tmp_path / "saved"), "--out", str(tmp_path / "back")])
    back = stored(tmp_path / "back")
    for name, array in stored(tmp_path / "run").items():
        assert np.array_equal(array[: SIZES["vocab_size"]], back[name][: SIZES["vocab_size"]])
    # Trainer would otherwise take the loss for a sum over all that it accumulates.
    assert not found.accepts_loss_kwargs
    given = torch.from_numpy(ids).long()
    labels = given.masked_fill(given % 3 == 0, -100)
    out = found(given, labels=labels)
    of_each = out.logits.log_softmax(-1)[:, :-1].gather(-1, given[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.loss, -of_each[given[:, 1:] % 3 != 0].mean())
    out.loss.backward()
    without = [name for name, w in found.named_parameters() if w.grad is None]
    assert all(name.endswith("e_score_correction_bias") for name in without)


def test_bfloat16_and_float16_folders_are_opened_and_read(tmp_path):
    make_run(tmp_path / "run", dense_layers=1)
    out = export(tmp_path / "run", tmp_path / "bfloat16", "--dtype", "bfloat16", "--remote_code")
    ids = torch.from_numpy(tokens()).long()[:, :32]
    found = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found.dtype == torch.bfloat16 and found.state_dict()[bias].dtype == torch.float32
    assert found(ids).logits.isfinite().all()
    found.half().save_pretrained(tmp_path / "float16")
    convert.main(["import", "--folder", str(tmp_path / "float16"), "--out", str(tmp_path / "back")])
    first = stored(tmp_path / "back")["weights.first.embedding"][: SIZES["vocab_size"]]
    expected = found.get_input_embeddings().weight.detach().float().numpy()
    assert np.array_equal(first, expected)
