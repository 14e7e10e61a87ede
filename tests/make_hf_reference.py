"""Write hf_reference.npz: logits of Hugging Face's DeepseekV3ForCausalLM for hf_case.py's cases.

Needs torch and transformers: `python tests/make_hf_reference.py`.
The file in the repository was made with torch 2.13.0 (CPU) and transformers 5.23.0.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hf_case
import utils
from hf_case import model_with

# Rounding changes a score by about 1e-6, which could change a choice with a smaller margin.
SMALLEST_MARGIN = 5e-4


def margin(gate, logits):
    """Return the least margin over tokens between the last chosen group or expert and the next."""
    ranking = logits.sigmoid() + gate.e_score_correction_bias
    groups = ranking.unflatten(-1, (gate.num_group, -1))
    scores = groups.topk(2).values.sum(-1)
    lost, last = next_and_last(scores, gate.topk_group)
    seen = groups.where((scores >= last[:, None])[..., None], -torch.inf)
    next_expert, last_expert = next_and_last(seen.flatten(1), gate.top_k)
    return float(torch.cat([last - lost, last_expert - next_expert]).min())


def next_and_last(scores, k):
    """Return the score after the k highest, -inf if there is none, and the lowest of those k."""
    ranked = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).sort(descending=True).values
    return ranked[:, k], ranked[:, k - 1]


@torch.no_grad()
def logits(case):
    """Return logits [B, T, V] in float32. Raises ValueError if a choice of experts is too close."""
    m = model_with(utils.Model(), **case.model)
    tensors = hf_case.hf_tensors(m, hf_case.weights(m, case.seed), interleaved=case.interleaved)
    with tempfile.TemporaryDirectory() as folder:
        hf_case.write_folder(Path(folder, "case"), hf_case.config_json(case), tensors)
        how = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            f"{folder}/case", dtype=torch.float32, output_loading_info=True, **how
        )
    assert not any(info.values()), info
    margins = []
    for layer in model.eval().model.layers[case.model["prefix_layers"] :]:
        layer.mlp.gate.register_forward_hook(
            lambda gate, _, result: margins.append(margin(gate, result[0]))
        )
    ids = torch.from_numpy(hf_case.tokens(case.model["vocab_size"]).astype(np.int64))
    result = model(input_ids=ids, use_cache=False).logits.numpy()
    if min(margins) < SMALLEST_MARGIN:
        raise ValueError(f"two experts are {min(margins):.1e} apart. Give the case another seed.")
    return result


def main():
    arrays = {name: logits(case) for name, case in hf_case.CASES.items()}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez_compressed(hf_case.LOGITS_FILE, versions=versions, **arrays)


if __name__ == "__main__":
    main()
