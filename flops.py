"""Model FLOPs by the rule that MFU is reported with."""

import utils
import weights
from model import Transformer

MFU_RULE = (
    "MFU = tokens/s * model FLOPs per token / bf16 peak; model FLOPs by appendix B of "
    "arXiv:2204.02311: 6 per active parameter (embedding lookup not counted), causal attention as "
    "half of its rectangle, no recomputation."
)


def palm_flops_per_token(m: utils.Model, declared: Transformer, sequence_length: int) -> float:
    """6 * active parameters + 3 * layers * heads * T * (query width + value width).

    The lookup in an untied embedding multiplies nothing; a tied one counts, as the output matrix.
    Attention is 12 * layers * heads * head width * T of the source, of which a causal one is half,
    and with its own widths for queries and values.

    Source  Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    _, active = weights.count(declared)
    lookup = 0 if m.tied else declared.first.embedding.size
    widths = m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim
    return 6.0 * (active - lookup) + 3.0 * m.layers * m.heads * sequence_length * widths
