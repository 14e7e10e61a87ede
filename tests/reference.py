"""The reference implementation of the model on one device, for tests of model.py.

It shares no code with model.py. Every expert computes every token, no token is dropped, and there
is no dropout. Results have the dtype of the weights, float32 or float64. `numpy_moe` implements the
experts once more, token by token; test_reference.py compares the rest with Hugging Face.

Letters as in model.py; F is the hidden width of a dense layer or an expert, Z two of them side by
side.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# By default accelerators multiply float32 matrices in lower precision.
einsum = functools.partial(jnp.einsum, precision="highest")


def rms_norm(x, scale, epsilon):
    """x / sqrt(mean(x^2) + epsilon) * scale, over the last dimension."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + epsilon) * jnp.broadcast_to(scale, x.shape)


def frequencies(model, R):
    """Return theta^(-2i/R) of each pair i, with YaRN (arXiv:2309.00071, section 3.2) or llama3."""
    if model.rope_scaling.rope_type == "llama3":
        return llama3_frequencies(model, R)
    frequency = model.rope_theta ** (-2 * np.arange(R) / R)  # of twice as many pairs as there are
    if model.rope_scaling.rope_type == "linear":
        return (frequency / model.rope_scaling.factor)[: R // 2]
    turns = model.rope_scaling.original_max_position_embeddings * frequency / (2 * np.pi)
    first = max([i for i in range(R) if turns[i] >= model.rope_scaling.beta_fast], default=0)
    last = min([i for i in range(R) if turns[i] <= model.rope_scaling.beta_slow], default=R - 1)
    if not model.rope_scaling.truncate:
        betas = np.array([model.rope_scaling.beta_fast, model.rope_scaling.beta_slow])
        # turns[0] theta^(-2i/R) = beta
        first, last = np.clip(
            R * np.log(turns[0] / betas) / (2 * np.log(model.rope_theta)), 0, R - 1
        )
    slowed = np.interp(np.arange(R), [first, max(last, first + 0.001)], [0.0, 1.0])
    return (frequency * (1 - slowed + slowed / model.rope_scaling.factor))[: R // 2]


def llama3_frequencies(model, R):
    """As apply_scaling of Llama 3's reference code has it, by wavelengths."""
    scaling, found = model.rope_scaling, []
    longest, shortest = (
        scaling.original_max_position_embeddings / factor
        for factor in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    for frequency in 1 / model.rope_theta ** (np.arange(0, R, 2) / R):
        wavelength = 2 * np.pi / frequency
        if shortest <= wavelength <= longest:
            rotations = scaling.original_max_position_embeddings / wavelength
            smooth = (rotations - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        elif wavelength > longest:
            frequency = frequency / scaling.factor
        found.append(frequency)
    return np.array(found)


def mscale(model, factor):
    """0.1 factor log(rope_factor) + 1 (arXiv:2309.00071, section 3.4)."""
    if model.rope_scaling.rope_type != "yarn":
        return 1.0
    return 0.1 * factor * np.log(model.rope_scaling.factor) + 1


def rotary_factor(model):
    """What YaRN multiplies rotated queries and keys by."""
    both = model.rope_scaling.mscale, model.rope_scaling.mscale_all_dim
    return mscale(model, both[0]) / mscale(model, both[1]) if all(both) else mscale(model, 1)


def rotate(x_BTNR, model):
    """Turn each pair (x_i, x_{i + R/2}) by position * frequency."""
    T, R = x_BTNR.shape[1], x_BTNR.shape[-1]
    frequency = jnp.asarray(frequencies(model, R), x_BTNR.dtype)
    angle = jnp.outer(jnp.arange(T, dtype=x_BTNR.dtype), frequency)[None, :, None, :]
    first, second = jnp.split(x_BTNR, 2, axis=-1)
    factor = float(rotary_factor(model))
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def queries(w, h_BTD, epsilon):
    """h @ up, or rms_norm(h @ down) @ up."""
    if "down" not in w:
        return einsum("BTD,DNA->BTNA", h_BTD, w["up"])
    latent_BTQ = rms_norm(einsum("BTD,DQ->BTQ", h_BTD, w["down"]), w["norm"], epsilon)
    return einsum("BTQ,QNA->BTNA", latent_BTQ, w["up"])


def attention(w, x_BTD, model, segments_BT, rotary):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1), without the residual."""
    if "key_value" in w:
        return grouped_attention(w, x_BTD, model, segments_BT, rotary)
    H, R = model.qk_nope_head_dim, model.qk_rope_head_dim
    epsilon = model.latent_rms_norm_eps or model.rms_norm_eps
    h_BTD = norm_of(w, "norm", x_BTD, model)
    q_nope, q_rope = jnp.split(queries(w["query"], h_BTD, epsilon), [H], axis=-1)
    kv_down = einsum("BTD,DZ->BTZ", h_BTD, w["kv_down"])
    latent_BTC, k_rope = jnp.split(kv_down, [model.kv_lora_rank], axis=-1)
    latent_BTC = rms_norm(latent_BTC, w["kv_norm"], epsilon)
    k_nope, v_BTNW = jnp.split(einsum("BTC,CNZ->BTNZ", latent_BTC, w["kv_up"]), [H], axis=-1)
    k_rope = k_rope[:, :, None, :]  # one key for all heads
    if rotary:
        q_rope, k_rope = rotate(q_rope, model), rotate(k_rope, model)
    scores = einsum("BTNH,BSNH->BNTS", q_nope, k_nope)
    scores += einsum("BTNR,BSR->BNTS", q_rope, k_rope[:, :, 0])
    scores *= (H + R) ** -0.5 * float(mscale(model, model.rope_scaling.mscale_all_dim)) ** 2
    scores = jnp.where(visible(segments_BT, model), scores, -jnp.inf)
    mixed_BTNW = einsum("BNTS,BSNW->BTNW", jax.nn.softmax(scores, axis=-1), v_BTNW)
    return einsum("BTNW,NWD->BTD", mixed_BTNW, w["out"])


def grouped_attention(w, x_BTD, model, segments_BT, rotary):
    """Grouped-query attention (arXiv:2305.13245), each query head by itself."""
    N, A = w["query"].shape[1:]
    kv = w["key_value"]
    h_BTD = norm_of(w, "norm", x_BTD, model)
    q, k, v = (einsum("BTD,DNA->BTNA", h_BTD, a) for a in (w["query"], kv["key"], kv["value"]))
    if model.attention_bias:
        biases = w["query_bias"], kv["key_bias"], kv["value_bias"]
        q, k, v = (a + bias[None, None] for a, bias in zip((q, k, v), biases, strict=True))
    if model.qk_norm and model.qk_norm_all_heads:
        flat = [(a.reshape(*a.shape[:2], -1), a) for a in (q, k)]
        scale = w["query_norm"].reshape(-1), kv["norm"].reshape(-1)
        normed = (rms_norm(a, s, model.rms_norm_eps) for (a, _), s in zip(flat, scale, strict=True))
        q, k = (a.reshape(b.shape) for a, (_, b) in zip(normed, flat, strict=True))
    elif model.qk_norm:
        q = rms_norm(q, w["query_norm"], model.rms_norm_eps)
        k = rms_norm(k, w["key_norm"], model.rms_norm_eps)
    if rotary:
        q, k = rotate(q, model), rotate(k, model)
    factor = (model.query_pre_attn_scalar or A) ** -0.5 * float(
        mscale(model, model.rope_scaling.mscale_all_dim)
    ) ** 2
    y_BTD = jnp.zeros_like(x_BTD)
    for n in range(N):
        kv_head = n // (N // k.shape[2])
        scores = factor * einsum("BTA,BSA->BTS", q[:, :, n], k[:, :, kv_head])
        scores = jnp.where(visible(segments_BT, model)[:, 0], scores, -jnp.inf)
        total = jnp.exp(scores).sum(-1, keepdims=True)
        if model.attention_sinks:
            total += jnp.exp(w["sinks"][n])
        mixed = einsum("BTS,BSA->BTA", jnp.exp(scores) / total, v[:, :, kv_head])
        y_BTD += einsum("BTA,AD->BTD", mixed, w["out"][n])
    return plus(y_BTD, w.get("out_bias"))


def visible(segments_BT, model):
    """[B, 1, T, S]: key S is not after query T, in the same document, and in the window."""
    T = segments_BT.shape[1]
    same = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    behind = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    near = behind < (model.sliding_window or T)
    return same & ((behind >= 0) & near)[None, None]


def norm_of(w, name, x_BTD, model):
    """The norm of a layer, if it has it."""
    return x_BTD if w.get(name) is None else rms_norm(x_BTD, w[name], model.rms_norm_eps)


def plus(x, bias):
    """x + bias, if there is one."""
    return x if bias is None else x + jnp.broadcast_to(bias, x.shape)


def swiglu(w, h_BTD, model):
    """down(act(gate h) * up h)."""
    gate_BTF = einsum("BTD,DF->BTF", h_BTD, w["gate"])
    up_BTF = einsum("BTD,DF->BTF", h_BTD, w["up"])
    if w.get("gate_bias") is not None:
        gate_BTF, up_BTF = plus(gate_BTF, w["gate_bias"]), plus(up_BTF, w["up_bias"])
    if limit := model.swiglu_limit:
        gate_BTF, up_BTF = jnp.minimum(gate_BTF, limit), 1 + jnp.clip(up_BTF, -limit, limit)
        gate_BTF /= 1 + jnp.exp(-1.702 * gate_BTF)
    elif model.hidden_act == "gelu_pytorch_tanh":
        inner = np.sqrt(2 / np.pi) * (gate_BTF + 0.044715 * gate_BTF**3)
        gate_BTF = 0.5 * gate_BTF * (1 + jnp.tanh(inner))
    else:
        gate_BTF = jax.nn.silu(gate_BTF)
    return einsum("BTF,FD->BTD", gate_BTF * up_BTF, w["down"])


def mlp(w, x_BTD, model):
    """The dense feed-forward, without the residual."""
    return swiglu(w, norm_of(w, "norm", x_BTD, model), model)


def moe(w, x_BTD, model):
    """Experts of DeepSeek-V3 (arXiv:2412.19437, eq. 12-20), without the residual.

    Returns y, how often each sequence chose each expert [B, E], and the balance loss, unscaled.
    """
    h_BTD = norm_of(w, "norm", x_BTD, model)
    score_BTE = scores(w, h_BTD, model)
    ranking = jax.lax.stop_gradient(score_BTE + jnp.broadcast_to(w["bias"], score_BTE.shape))
    _, choice_BTK = jax.lax.top_k(of_best_groups(ranking, model), model.num_experts_per_tok)
    chosen_BTKE = jax.nn.one_hot(choice_BTK, model.n_routed_experts, dtype=x_BTD.dtype)
    weight_BTK = einsum("BTKE,BTE->BTK", chosen_BTKE, score_BTE)
    if model.norm_topk_prob:
        weight_BTK = weight_BTK / (jnp.sum(weight_BTK, axis=-1, keepdims=True) + 1e-20)
    weight_BTE = einsum("BTKE,BTK->BTE", chosen_BTKE, weight_BTK * model.routed_scaling_factor)
    # Expert by expert, all at once: the same swiglu, mapped over the experts' weights.
    experts = {name: part for name, part in w["experts"].items() if part is not None}
    expert_EBTD = jax.vmap(lambda w: swiglu(w, h_BTD, model))(experts)
    if w.get("output_bias") is not None:
        expert_EBTD += jnp.broadcast_to(w["output_bias"][:, None, None], expert_EBTD.shape)
    y_BTD = einsum("BTE,EBTD->BTD", weight_BTE, expert_EBTD)
    if w["shared"] is not None:
        y_BTD += swiglu(w["shared"], h_BTD, model)
    counts_BE = jnp.sum(chosen_BTKE, axis=(1, 2))
    return y_BTD, counts_BE, balance(score_BTE, counts_BE, model)


def of_best_groups(ranking_BTE, model):
    """-inf but in the groups that fewer than groups_per_token have a higher sum of two than."""
    B, T, E = ranking_BTE.shape
    groups = ranking_BTE.reshape(B, T, model.n_group, E // model.n_group)
    counted = 1 if model.topk_method == "group_limited_greedy" else 2
    two = jnp.sort(groups, axis=-1)[..., -counted:].sum(-1)
    better = (two[:, :, None, :] > two[:, :, :, None]).sum(-1)
    seen = better[..., None] < model.topk_group
    return jnp.where(seen, groups, -jnp.inf).reshape(B, T, E)


def scores(w, h_BTD, model):
    """How well each expert suits each token, between 0 and 1."""
    score = jax.nn.sigmoid if model.scoring_func == "sigmoid" else jax.nn.softmax
    logits_BTE = einsum("BTD,DE->BTE", h_BTD, w["router"])
    return score(plus(logits_BTE, w.get("router_bias")))


def balance(score_BTE, counts_BE, model):
    """mean over sequences of sum_e f_e P_e (arXiv:2412.19437, eq. 17-20)."""
    T = score_BTE.shape[1]
    f_BE = counts_BE * (model.n_routed_experts / (model.num_experts_per_tok * T))
    p_BE = jnp.mean(score_BTE / jnp.sum(score_BTE, axis=-1, keepdims=True), axis=1)
    return jnp.mean(jnp.sum(jax.lax.stop_gradient(f_BE) * p_BE, axis=-1))


def take(tree, *index):
    """One layer of a stack of layers."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def layers(weights, model):
    """Each layer's weights, first to last."""
    for i in range(model.first_k_dense_replace):
        yield take(weights["prefix"], i)
    for block in range(model.blocks):
        for run in model.runs:  # only for how the weights are stacked
            for i in range(run.layers):
                yield take(weights["blocks"][run.name], block, *[i] * run.stacked)


def forward(weights, tokens_BT, model, segments_BT):
    """Logits, the sum of balance losses before its factor, and each MoE layer's counts [B, E]."""
    weights = jax.tree.map(jnp.asarray, weights)
    x_BTD = weights["embedding"][tokens_BT] * model.embedding_multiplier
    counts, balances = [], jnp.zeros((), x_BTD.dtype)
    for number, w in enumerate(layers(weights, model)):
        interval = model.no_rope_layer_interval
        rotary = not interval or (number + 1) % interval != 0
        here = model
        if model.layer_types and model.layer_types[number % len(model.layer_types)][0] == "f":
            here = dataclasses.replace(model, sliding_window=0)
        elif model.rope_local_base_freq and model.sliding_window:
            scaling = dataclasses.replace(model.rope_scaling, factor=1.0)
            theta = model.rope_local_base_freq
            here = dataclasses.replace(model, rope_theta=theta, rope_scaling=scaling)
        y_BTD = attention(w["attention"], x_BTD, here, segments_BT, rotary)
        x_BTD += norm_of(w["attention"], "norm_after", y_BTD, model)
        if "mlp" in w:
            x_BTD += norm_of(w["mlp"], "norm_after", mlp(w["mlp"], x_BTD, model), model)
        else:
            y_BTD, counts_BE, layer_balance = moe(w["moe"], x_BTD, model)
            x_BTD += norm_of(w["moe"], "norm_after", y_BTD, model)
            balances += layer_balance
            counts.append(counts_BE)
    x_BTD = rms_norm(x_BTD, weights["final_norm"], model.rms_norm_eps)
    output = weights["embedding"] if weights["output"] is None else weights["output"]
    logits_BTV = einsum("BTD,VD->BTV", x_BTD, output)
    is_token = jnp.arange(output.shape[0])[None, None, :] < model.vocab_size
    return jnp.where(is_token, logits_BTV, -jnp.inf), balances, counts


def logits(weights, tokens, model, segments=None):
    """[B, T, V]; ids that the tokenizer does not have are at -inf."""
    segments = jnp.zeros_like(tokens) if segments is None else segments
    return forward(weights, jnp.asarray(tokens), model, jnp.asarray(segments))[0]


def loss(weights, batch, model):
    """cross_entropy + balance + z, and these as added.

    The parts also hold "tokens_per_expert", integers [MoE layers, E].
    """
    batch = jax.tree.map(jnp.asarray, batch)
    logits_BTV, balances, counts = forward(weights, batch["tokens"], model, batch["segments"])
    log_z = jax.nn.logsumexp(logits_BTV, axis=-1)
    target = jnp.take_along_axis(logits_BTV, batch["targets"][:, :, None], axis=-1)[:, :, 0]
    weight = batch["loss_weights"].astype(logits_BTV.dtype)
    parts = {
        "cross_entropy": jnp.sum(weight * (log_z - target)) / jnp.sum(weight),
        "balance": model.aux_loss_alpha * balances,
        "z": model.z_loss * jnp.sum(weight * jnp.square(log_z)) / jnp.sum(weight),
    }
    per_expert = [jnp.sum(counts_BE, axis=0).astype(jnp.int32) for counts_BE in counts]
    none = jnp.zeros((0, model.n_routed_experts), jnp.int32)
    per_layer = jnp.stack(per_expert) if per_expert else none
    return sum(parts.values()), parts | {"tokens_per_expert": per_layer}


def numpy_swiglu(gate, up, down, h):
    return (h @ gate / (1 + np.exp(-(h @ gate))) * (h @ up)) @ down


def numpy_choices(ranking, model):
    """The K best experts of the best groups, best first."""
    groups = np.split(np.arange(model.n_routed_experts), model.n_group)
    counted = 1 if model.topk_method == "group_limited_greedy" else 2
    groups.sort(key=lambda group: -sum(sorted(ranking[group])[-counted:]))
    seen = np.concatenate(groups[: model.topk_group])
    return sorted(seen, key=lambda e: (-ranking[e], e))[: model.num_experts_per_tok]


def numpy_moe(w, x_TD, model, kept_TK=None):
    """`moe` of one sequence, token by token: y [T, D], choices [T, K] and the balance loss.

    kept_TK  which choices are within the capacity of their expert; None for all.
    """
    E, K, T = model.n_routed_experts, model.num_experts_per_tok, len(x_TD)
    y_TD, choices_TK, share_TE = np.zeros_like(x_TD), np.zeros((T, K), int), np.zeros((T, E))
    for t in range(T):
        h = w["norm"] * x_TD[t] / np.sqrt(np.mean(x_TD[t] ** 2) + model.rms_norm_eps)
        logit = h @ w["router"]
        sigmoid = model.scoring_func == "sigmoid"
        s = 1 / (1 + np.exp(-logit)) if sigmoid else np.exp(logit) / np.sum(np.exp(logit))
        choices_TK[t] = numpy_choices(s + w["bias"], model)
        total = np.sum(s[choices_TK[t]]) + 1e-20 if model.norm_topk_prob else 1.0
        for e in choices_TK[t] if kept_TK is None else choices_TK[t][kept_TK[t]]:
            expert = numpy_swiglu(*(w["experts"][name][e] for name in ("gate", "up", "down")), h)
            y_TD[t] += model.routed_scaling_factor * s[e] / total * expert
        if w["shared"] is not None:
            y_TD[t] += numpy_swiglu(*(w["shared"][name] for name in ("gate", "up", "down")), h)
        share_TE[t] = s / np.sum(s)
    f = [E / (K * T) * np.sum(choices_TK == e) for e in range(E)]
    return y_TD, choices_TK, sum(f[e] * np.mean(share_TE[:, e]) for e in range(E))
