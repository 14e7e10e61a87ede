"""The model of model.py in torch, for transformers with trust_remote_code=True.

convert.py copies this file beside exported weights; it does not depend on the project. Multi-head
latent attention (arXiv:2405.04434) or grouped-query attention (arXiv:2305.13245), gated
feed-forward networks, mixture of experts (arXiv:2412.19437). Every n-th layer may lack the
rotary embedding. Weights have the names of DeepSeek-V3 and, in grouped-query attention, of Qwen3.
"""

import math

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

logger = logging.get_logger(__name__)
TRANSFORMERS_4 = transformers.__version__.startswith("4.")


class LatentMoeConfig(PretrainedConfig):
    model_type = "latent_moe"
    # transformers 5.24 renames the output `past_key_values` to `cache`.
    keys_to_ignore_at_inference = ("cache", "past_key_values")


def has_experts(config: LatentMoeConfig, layer: int) -> bool:
    """Return whether a layer has experts: the last of each block after the first dense layers."""
    after = layer - config.first_k_dense_replace
    step = config.decoder_sparse_step
    return bool(config.n_routed_experts) and after >= 0 and (after + 1) % step == 0


def has_positions(config: LatentMoeConfig, layer: int) -> bool:
    """Return whether queries and keys of a layer are rotated by their positions."""
    interval = config.no_rope_layer_interval
    return not interval or (layer + 1) % interval != 0


def frequencies(config: LatentMoeConfig) -> tuple[torch.Tensor, float, float]:
    """Return rotary frequencies [R/2], and the factors on cosine and sine and on scores.

    The factors are 1 without YaRN (arXiv:2309.00071). Llama 3 (arXiv:2407.21783) has another rule.
    """
    half = (config.head_dim if config.attention == "gqa" else config.qk_rope_head_dim) // 2
    base = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    yarn = config.yarn
    if not yarn:
        return base, 1.0, 1.0

    if yarn["rope_type"] == "llama3":
        rotations = yarn["original_max_position_embeddings"] * base / (2 * math.pi)
        slow_at, fast_at = yarn["low_freq_factor"], yarn["high_freq_factor"]
        slow = ((fast_at - rotations) / (fast_at - slow_at)).clamp(0, 1)
        return base * (1 - slow) + base / yarn["factor"] * slow, 1.0, 1.0

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(yarn["factor"]) + 1

    def dim(rotations: float) -> float:  # the pair with so many rotations in the original context
        length = yarn["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return half * math.log(length) / math.log(config.rope_theta)

    low = max(math.floor(dim(yarn["beta_fast"])), 0)
    high = min(math.ceil(dim(yarn["beta_slow"])), 2 * half - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    m, all_dim = yarn["mscale"], yarn["mscale_all_dim"]
    rotary = magnitude(m) / magnitude(all_dim) if m and all_dim else magnitude(1)
    scores = magnitude(all_dim) ** 2 if all_dim else 1.0
    return base * (1 - slow) + base / yarn["factor"] * slow, rotary, scores


def rotate(x, cos, sin, interleaved):
    """Rotate pairs of x [B, N, T, R] by cos and sin [B, 1, T, R/2]: (i, i + R/2), or (2i, 2i + 1).

    The result is not interleaved: the first elements of all pairs, then the second ones.
    """
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    a, b = a.float(), b.float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(q, k, v, visible, scale, with_weights):
    """Return the values [B, N, T, A] that are attended to, and the weights if requested.

    visible  [B, 1 or N, T, S]  booleans, or numbers that are added to the scores.
    """
    if not with_weights:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale), None
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if visible.dtype == torch.bool:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    else:
        scores = scores + visible
    weights = scores.softmax(-1).to(v.dtype)
    return weights @ v, weights


class GroupedAttention(nn.Module):
    def __init__(self, config: LatentMoeConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.rope = has_positions(config, layer)
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        D, A, biased = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(D, self.heads * A, bias=biased)
        self.k_proj = nn.Linear(D, self.key_heads * A, bias=biased)
        self.v_proj = nn.Linear(D, self.key_heads * A, bias=biased)
        self.o_proj = nn.Linear(self.heads * A, D, bias=False)
        self.normed = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(A, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(A, config.rms_norm_eps)
        self.scale = A**-0.5 * frequencies(config)[2]

    def forward(self, x, cos, sin, visible, position, cache, with_weights):
        """x [B, T, D]; cos and sin as in `rotate`; visible as in `attend`; position [T] are the
        indices in the cache.
        """
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = (
            project(x).view(B, T, self.key_heads, -1).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, cos, sin, False), rotate(k, cos, sin, False)
        if cache is not None:
            k, v = cache.update(k, v, self.layer, {"cache_position": position})
        k, v = (a.repeat_interleave(self.heads // self.key_heads, dim=1) for a in (k, v))
        y, weights = attend(q, k, v, visible, self.scale, with_weights)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), weights


class Attention(nn.Module):
    def __init__(self, config: LatentMoeConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.rope = has_positions(config, layer)
        self.heads, self.latent = config.num_attention_heads, config.kv_lora_rank
        self.plain, self.rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value = config.v_head_dim
        D, A = config.hidden_size, self.plain + self.rotary
        epsilon = config.latent_rms_norm_eps or config.rms_norm_eps
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(D, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, epsilon)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * A, bias=False)
        else:
            self.q_proj = nn.Linear(D, self.heads * A, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(D, self.latent + self.rotary, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, epsilon)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, D, bias=False)
        self.scale = A**-0.5 * frequencies(config)[2]

    def forward(self, x, cos, sin, visible, position, cache, with_weights):
        """x [B, T, D]; cos and sin as in `rotate`; visible as in `attend`; position [T] are the
        indices in the cache.
        """
        B, T, _ = x.shape
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(B, T, self.heads, -1).transpose(1, 2)
        latent, key = self.kv_a_proj_with_mqa(x).split([self.latent, self.rotary], dim=-1)
        latent, key = self.kv_a_layernorm(latent)[:, None], key[:, None]
        if self.rope:
            q_plain, q_rotary = q.split([self.plain, self.rotary], dim=-1)
            q = torch.cat([q_plain, rotate(q_rotary, cos, sin, True)], dim=-1)
            key = rotate(key, cos, sin, True)
        if cache is not None:  # holds latents and rotary keys only
            latent, key = cache.update(latent, key, self.layer, {"cache_position": position})
        kv = self.kv_b_proj(latent[:, 0]).view(B, key.shape[2], self.heads, -1).transpose(1, 2)
        k_plain, v = kv.split([self.plain, self.value], dim=-1)
        k = torch.cat([k_plain, key.expand(-1, self.heads, -1, -1)], dim=-1)
        y, weights = attend(q, k, v, visible, self.scale, with_weights)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), weights


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config: LatentMoeConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        # A buffer, which no optimizer takes for a weight: it gets no gradient.
        bias = torch.zeros(config.n_routed_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x):
        """Return the K experts of each token of x [n, D], and their weights [n, K] in float32."""
        c = self.config
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if c.scoring_func == "sigmoid" else logits.softmax(-1)
        ranked = scores.detach() + self.e_score_correction_bias.float()
        if c.n_group > 1:
            groups = ranked.view(len(x), c.n_group, -1)
            counted = 1 if c.topk_method == "group_limited_greedy" else 2
            best = groups.topk(counted)[0].sum(-1).topk(c.topk_group)[1]
            kept = torch.zeros(len(x), c.n_group, device=x.device).scatter_(1, best, 1).bool()
            ranked = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
        choice = ranked.topk(c.num_experts_per_tok)[1]
        weight = scores.gather(1, choice)
        if c.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return choice, weight * c.routed_scaling_factor


class Moe(nn.Module):
    def __init__(self, config: LatentMoeConfig):
        super().__init__()
        D, G = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = nn.ModuleList(Mlp(D, G) for _ in range(config.n_routed_experts))
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = Mlp(D, G * config.n_shared_experts)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        choice, weight = self.gate(flat)
        y = torch.zeros_like(flat)
        for e in choice.unique().tolist():
            token, k = torch.where(choice == e)
            part = self.experts[e](flat[token]) * weight[token, k, None].to(x.dtype)
            y.index_add_(0, token, part)
        if self.shared_experts is not None:
            y = y + self.shared_experts(flat)
        return y.view_as(x)


class Layer(GradientCheckpointingLayer):
    def __init__(self, config: LatentMoeConfig, layer: int):
        super().__init__()
        D, is_moe = config.hidden_size, has_experts(config, layer)
        self.input_layernorm = nn.RMSNorm(D, config.rms_norm_eps)
        kind = GroupedAttention if config.attention == "gqa" else Attention
        self.self_attn = kind(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(D, config.rms_norm_eps)
        self.mlp = Moe(config) if is_moe else Mlp(D, config.intermediate_size)

    def forward(self, x, *args):
        y, weights = self.self_attn(self.input_layernorm(x), *args)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), weights


class LatentMoePreTrainedModel(PreTrainedModel):
    config_class = LatentMoeConfig
    base_model_prefix = "model"
    _no_split_modules = ("Layer",)
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    # Rounding could select another expert.
    _keep_in_fp32_modules_strict = ("e_score_correction_bias",)

    def __init__(self, config: LatentMoeConfig):
        super().__init__(config)
        # transformers 4 refuses names of buffers, and loads these with their data type.
        if TRANSFORMERS_4 or not any(
            has_experts(config, i) for i in range(config.num_hidden_layers)
        ):
            self._keep_in_fp32_modules_strict = None

    @classmethod
    def _can_set_attn_implementation(cls):
        return True  # transformers would search this file for its own attention functions

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding, Router)):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Router):
            nn.init.zeros_(module.e_score_correction_bias)
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


class LatentMoeModel(LatentMoePreTrainedModel):
    def __init__(self, config: LatentMoeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def visible(self, mask, position, length):
        """Return the attention mask of queries at `position` [T] for `length` keys, as `attend`.

        mask  [B, S] of text and padding, or [B, 1 or N, T, S], which replaces the causal mask.
        """
        key, query = torch.arange(length, device=position.device), position[:, None]
        near = key > query - (self.config.attention_window or math.inf)
        if mask is not None and mask.dim() == 4:
            mask = mask[..., :length]
            if mask.dtype == torch.bool:
                return mask & near
            return mask.masked_fill(~near, torch.finfo(mask.dtype).min)
        causal = ((key <= query) & near)[None, None]
        if mask is None:
            return causal
        # Padding attends to itself: softmax over no position would be NaN.
        is_text = F.pad(mask[:, :length], (0, max(0, length - mask.shape[1])))[:, None, None]
        return causal & (is_text.bool() | (key == query))

    def cache_of(self, given, use_cache):
        """Return the cache to use: the given one, a new one, or None."""
        if use_cache is None:
            use_cache = getattr(self.config, "use_cache", True) and not self.training
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if use_cache or given is not None:
                logger.warning_once("Gradient checkpointing uses no cache: use_cache=False.")
            return None
        return DynamicCache() if use_cache and given is None else given

    def cached(self, cache, T):
        """Return the positions before T new ones, and the number of keys that attention gets."""
        past = cache.get_seq_length() if cache is not None else 0
        # A static cache returns all of its keys, of which the last ones are not written yet.
        kept = cache.layers[0] if cache is not None and cache.layers else None
        if TRANSFORMERS_4 and hasattr(kept, "max_cache_len") and self.config.attention == "mla":
            raise ValueError(
                "A static cache of transformers 4 holds keys and values of one width, and latents "
                "and rotary keys differ. Use a dynamic cache, or transformers 5."
            )
        return past, getattr(kept, "max_cache_len", past + T)

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        output_attentions=None,
        cache=None,
        **_,
    ):
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, not both or none.")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if output_attentions is None:
            output_attentions = config.output_attentions
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        # transformers 5.24 renames the argument `past_key_values` to `cache`.
        cache = self.cache_of(past_key_values if cache is None else cache, use_cache)
        past, length = self.cached(cache, T)
        position = past + torch.arange(T, device=x.device)
        visible = self.visible(attention_mask, position, length)
        if visible.dtype != torch.bool:
            visible = visible.to(x.dtype)
        if position_ids is None:
            position_ids = position[None].expand(B, T)
        frequency, factor, _ = frequencies(config)
        angle = (position_ids[..., None].float() * frequency.to(x.device))[:, None]
        rotary = factor * angle.cos(), factor * angle.sin()
        states, attentions = [], []
        with_weights = output_attentions or config._attn_implementation == "eager"
        for layer in self.layers:
            states.append(x if output_hidden_states else None)
            x, weights = layer(x, *rotary, visible, position, cache, with_weights)
            attentions.append(weights if output_attentions else None)
        x = self.norm(x)
        # By position: before transformers 5.24 the second field is `past_key_values`.
        return BaseModelOutputWithPast(
            x,
            cache,
            (*states, x) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )


class LatentMoeForCausalLM(LatentMoePreTrainedModel, GenerationMixin):
    accepts_loss_kwargs = False  # the loss is a mean over the batch; Trainer averages
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LatentMoeConfig):
        super().__init__(config)
        self.model = LatentMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        output_hidden_states=None,
        output_attentions=None,
        cache=None,
        shift_labels=None,
        **_,
    ):
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds
        options = use_cache, output_hidden_states, output_attentions
        outputs = self.model(*inputs, *options, cache=cache, return_dict=True)
        is_count = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None and shift_labels is None:  # -100 is ignored
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if shift_labels is not None:  # from the caller if the sequence is sharded over devices
            loss = F.cross_entropy(logits.float().flatten(0, 1), shift_labels.flatten())
        cache = getattr(outputs, "cache", None) or getattr(outputs, "past_key_values", None)
        # By position: before transformers 5.24 the third field is `past_key_values`.
        return CausalLMOutputWithPast(
            loss, logits, cache, outputs.hidden_states, outputs.attentions
        )
