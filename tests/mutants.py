"""Measure the power of the tests: apply one fault at a time, and see whether they fail.

    ./run.sh python tests/mutants.py --check                verify that each fault applies
    ./run.sh python tests/mutants.py                        run the tests of all faults
    ./run.sh python tests/mutants.py --only NAME ..         those of some faults
    ./run.sh python tests/mutants.py --files model.py ..    those of the faults in some files

A fault is a line that a person could write by mistake. For each, this script copies the tree to a
temporary folder, applies the fault there, and runs its test files until a test fails. A fault is
caught if a test fails, if the process of the tests crashes, or after LIMIT_S. Compiled programs are
cached in the folder that run.sh sets.

RECORD has a line for each result, and a stopped run continues. A result is valid for one content of
the fault, its file and its test files. Ctrl-C waits for the fault that runs. Exit code: 1 if fewer
of the faults are caught than ENOUGH.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".cache" / "mutants.jsonl"
LIMIT_S = 900  # of the tests of a fault
ENOUGH = 0.95
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]


class Fault(NamedTuple):
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # files that should notice it


# `== FILE: TESTS` begins the faults of a file, whose tests are in tests/test_NAME.py. A fault is
# its name, the old text after "- " and the new text after "+ ", each on one line or several.
# `NAME: TESTS` gives a fault other test files.
FAULTS = r"""
== weights.py: weights
init-deviation-1-over-fan-in
- for letter in inputs.split()) ** -0.5
+ for letter in inputs.split()) ** -1.0
init-key-from-last-part-of-name
- zlib.crc32(w.name.encode())
+ zlib.crc32(w.name.rpartition(".")[2].encode())
init-seed-not-used
- (jax.random.key(seed))
+ (jax.random.key(0))
init-fan-in-of-last-letter-only
- math.prod(sizes[letter].size for letter in inputs.split())
+ math.prod(sizes[letter].size for letter in inputs.split()[-1:])
gradients-are-means-over-replicas
- return lax.psum(grad, "replica")
+ return lax.pmean(grad, "replica")
gradient-psum-lacks-fsdp
- for axis in MESH_AXES[1:] if axis not in w.axes)
+ for axis in MESH_AXES[2:] if axis not in w.axes)
gathered-gradients-summed-in-bfloat16
- _scatter(grad.astype(jnp.float32), dim).astype(grad.dtype)
+ _scatter(grad, dim)
norms-cast-to-compute-dtype
- a if w.float32 else a.astype(dtype)
+ a.astype(dtype)
active-share-inverted
- sizes[active[0]].size / sizes[active[1]].size
+ sizes[active[1]].size / sizes[active[0]].size
divisible-value-for-one-dimension
- step = math.lcm(*(n
+ step = max(1, *(n
norm-epsilon-outside-root: model
- (x32 * lax.rsqrt(mean + epsilon) * scale)
+ (x32 / (jnp.sqrt(mean) + epsilon) * scale)
norm-in-compute-dtype: model
- x32 = x.astype(jnp.float32)
+ x32 = x
== model.py: model
embedding-without-mask
- return jnp.where(held[..., None], table_vD[row], 0)
+ return table_vD[row]
embedding-gradient-of-other-ranks
- row = jnp.where(held, row, table_vD.shape[0])
+ row = jnp.where(row >= 0, row, table_vD.shape[0])
log-z-without-maximum
- log_Z_n = jnp.log(Z_n) + top_n
+ log_Z_n = jnp.log(Z_n)
z-loss-not-squared
- (weights_n * log_Z_n**2).sum()
+ (weights_n * log_Z_n).sum()
one-padding-id-has-a-logit
- [None, :] < vocabulary, logits_nv, -jnp.inf)
+ [None, :] <= vocabulary, logits_nv, -jnp.inf)
output-gradient-of-last-chunk-only
- d_table_vD += float32_product("nv,nD->vD", d_logits_nv, h_nD)
+ d_table_vD = float32_product("nv,nD->vD", d_logits_nv, h_nD)
loss-has-one-chunk-too-many
- smallest = -(-tokens // most)
+ smallest = tokens // most + 1
top-k-of-unbiased-scores
- lax.stop_gradient(scores_btE + bias_E)
+ lax.stop_gradient(scores_btE)
weights-of-biased-scores
- weight_btK = jnp.take_along_axis(scores_btE, choice_btK, axis=-1)
+ weight_btK = jnp.take_along_axis(ranking_btE, choice_btK, axis=-1)
weights-normalized-over-all-experts
- weight_btK /= weight_btK.sum(-1, keepdims=True) + 1e-20
+ weight_btK /= scores_btE.sum(-1, keepdims=True) + 1e-20
routed-scaling-factor-not-used
- return share_btE, choice_btK, weight_btK * m.routed_scaling_factor
+ return share_btE, choice_btK, weight_btK
groups-ranked-by-two-best-always
- counted = 1 if m.topk_method == "group_limited_greedy" else 2
+ counted = 2
groups-ranked-by-best-expert
- lax.top_k(counted_btZk.sum(-1), m.topk_group)
+ lax.top_k(counted_btZk.max(-1), m.topk_group)
balance-length-of-own-positions
- T = share_btE.shape[1] * lax.axis_size("tensor")
+ T = share_btE.shape[1]
balance-without-experts-per-token
- m.n_routed_experts / (m.num_experts_per_tok * T)
+ m.n_routed_experts / T
balance-counts-of-own-tokens
- f_bE = lax.psum(count_bE, "tensor").astype(jnp.float32) * (
+ f_bE = count_bE.astype(jnp.float32) * (
balance-of-unnormalized-scores
- share_btE = scores_btE / scores_btE.sum(-1, keepdims=True)
+ share_btE = scores_btE
capacity-off-by-one
- jnp.where(place < capacity, expert * capacity + place
+ jnp.where(place <= capacity, expert * capacity + place
capacity-rounded-down
- return min(tokens, math.ceil(factor *
+ return min(tokens, math.floor(factor *
capacity-by-sequence-first
- by_position = choice_btK.swapaxes(0, 1).reshape(-1)
+ by_position = choice_btK.reshape(-1)
dropped-counts-kept
- dropped = slot_nK.size - (slot_nK <
+ dropped = (slot_nK <
dropless-experts-of-fsdp-rank
- choice_rK -= lax.axis_index(axes) * w.gate.shape[0]
+ choice_rK -= lax.axis_index("fsdp") * w.gate.shape[0]
tile-of-previous-expert
- (self.last_e <= i).sum(
+ (self.last_e < i).sum(
batched-choices-beyond-an-expert
- rest_e = jnp.minimum(first_e[:-1] + skip, first_e[1:])
+ rest_e = first_e[:-1] + skip
first-overflow-tile-skipped
- lax.fori_loop(load.tiles, end, lambda i, y_rD:
+ lax.fori_loop(load.tiles + 1, end, lambda i, y_rD:
silu-of-up
- hidden = jax.nn.silu(gate) * up
+ hidden = gate * jax.nn.silu(up)
dropout-not-scaled
- jnp.where(kept, y_btD / (1 - options.dropout), 0)
+ jnp.where(kept, y_btD, 0)
dropout-equal-on-tensor-ranks
- lax.axis_index(BATCH_AXES), lax.axis_index("tensor")):
+ lax.axis_index(BATCH_AXES)):
dropout-equal-in-both-branches
- for number in (*position, branch, lax
+ for number in (*position, lax
dropout-after-residual
- return x_btD + dropout(y_btD, options, position, 1), routing
+ return dropout(x_btD + y_btD, options, position, 1), routing
layer-number-without-prefix
- layer = m.first_k_dense_replace + number * m.decoder_sparse_step
+ layer = number * m.decoder_sparse_step
rope-in-layers-with-experts
- rope = options.model.rope_in_moe_layers
+ rope = True
== attention.py: attention model
scores-scale-1-over-width
- return width**-0.5 *
+ return width**-1.0 *
scale-of-width-without-position
- return softmax_scale(m, cls.widths(m)[0])
+ return softmax_scale(m, m.qk_nope_head_dim)
rotary-sign
- (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
+ (a * jnp.cos(angle) + b * jnp.sin(angle), b * jnp.cos(angle) - a * jnp.sin(angle))
rotary-frequencies-too-high
- theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
+ theta ** (-jnp.arange(half, dtype=jnp.float32) / R)
yarn-interpolation-inverted
- return frequency * (1 - slowed) + frequency / scaling.factor * slowed
+ return frequency * slowed + frequency / scaling.factor * (1 - slowed)
llama3-interpolation-inverted: grouped_query
- slowed = (high - rotations) / (high - low)
+ slowed = (rotations - low) / (high - low)
causal-mask-excludes-itself
- mask = key <= query
+ mask = key < query
window-one-longer
- mask &= key > query - window
+ mask &= key >= query - window
attention-crosses-documents
- mask &= segments[:, None, :, None] == segments[:, None, None, :]
+ mask &= segments[:, None, :, None] >= segments[:, None, None, :]
key-head-of-another-rank: grouped_query
- one = lax.axis_index("tensor") * heads // lax.axis_size("tensor")
+ one = lax.axis_index("tensor") % heads
key-heads-tiled-not-repeated: attention
- (jnp.repeat(a, times, axis=2) for a in (k_bSyA, v_bSyW))
+ (jnp.tile(a, (1, 1, times, 1)) for a in (k_bSyA, v_bSyW))
latent-epsilon-not-used: model convert
- epsilon = m.latent_rms_norm_eps or m.rms_norm_eps
+ epsilon = m.rms_norm_eps
keys-have-the-norm-of-queries: grouped_query
- rms_norm(k_bTyA, self.key_norm,
+ rms_norm(k_bTyA, self.query_norm,
value-bias-forgotten: grouped_query
- v_bTyA = _project(h_bTD, kv.value, kv.value_bias)
+ v_bTyA = _project(h_bTD, kv.value, None)
value-replaced-by-key: grouped_query
- v_bTyA = _project(h_bTD, kv.value, kv.value_bias)
+ v_bTyA = _project(h_bTD, kv.key, kv.value_bias)
computed-share-off-by-one: attention
- farthest = (window(config) or T) + size - 2
+ farthest = (window(config) or T) + size - 1
kernel-not-on-ampere: attention
- int(generation) < 8
+ int(generation) <= 8
== attention_kernels/splash.py: attention
splash-without-scale
- q * scale, k, v, extra)
+ q, k, v, extra)
splash-window-one-longer
- masks.LocalMask(shape, (window - 1, 0), 0)
+ masks.LocalMask(shape, (window, 0), 0)
splash-block-does-not-divide
- for size in range(BLOCK, 0, -LANES) if T % size == 0)
+ for size in range(BLOCK, 0, -LANES) if T >= size)
== attention_kernels/cudnn.py: attention
cudnn-window-one-longer
- visible &= ~jnp.tri(T, k=-window, dtype=bool)
+ visible &= ~jnp.tri(T, k=-window - 1, dtype=bool)
cudnn-key-gradients-averaged
- g.shape[-1]).sum(3)
+ g.shape[-1]).mean(3)
cudnn-gradient-without-scale
- d_bnTS = (scale * share_bnTS * d_bnTS)
+ d_bnTS = (share_bnTS * d_bnTS)
== attention_kernels/triton.py: attention
triton-ignores-segments
- extra = () if segments is None else (segments,)
+ extra = ()
triton-values-not-cut
- q, k, padded, extra)[..., : v.shape[-1]]
+ q, k, padded, extra)
== pipeline.py: pipeline
block-number-of-contiguous-stages
- number = (chunk * self.schedule.pipeline + self.rank) * self.blocks_per_chunk + i
+ number = (self.rank * self.schedule.virtual + chunk) * self.blocks_per_chunk + i
ring-slot-of-backward-number
- slot = self.schedule.task_number(chunk, m) % self.schedule.ring_slots
+ slot = number % self.schedule.ring_slots
idle-results-multiplied-by-0
- a + jnp.where(valid, v, 0).astype(a.dtype), old, values)
+ a + (v * valid).astype(a.dtype), old, values)
gradients-sent-forward
- send(carry.d_x, schedule.pipeline, -1)
+ send(carry.d_x, schedule.pipeline, 1)
embedding-gradient-from-every-rank
- vjp(jnp.where(self.rank == 0, d_x, 0))
+ vjp(d_x)
blocks-backward-in-forward-order
- (d_x, carry.grads.blocks), numbers, reverse=True)
+ (d_x, carry.grads.blocks), numbers)
loss-of-the-sum-of-all-stages
- y = lax.psum(jnp.where(self.is_last_rank(), carry.x, 0), "pipeline")
+ y = lax.psum(carry.x, "pipeline")
evaluation-stores-at-own-microbatch
- run.microbatch(done), y)[1], done)
+ run.microbatch(done), y)[1], m)
gradients-of-last-function-not-added
- grads = jax.tree.map(lambda g, d: g + d.astype(g.dtype), grads, d_outer)
+ grads = jax.tree.map(lambda g, d: d.astype(g.dtype), grads, d_outer)
branch-shares-exchanged: cost hlo
- return [1 - runs, runs]
+ return [runs, 1 - runs]
== schedule.py: schedule
backward-one-tick-late
- (self.stages - 1) - (self.pipeline - 1 - rank)
+ (self.stages - 1) - (self.pipeline - rank)
ring-one-slot-short
- return min(2 * self.stages - 1,
+ return min(2 * self.stages - 2,
microbatch-within-all-stages
- self.pipeline + k % self.pipeline
+ self.pipeline + k % self.stages
backward-chunks-in-forward-order
- return self.virtual - 1 - chunk, microbatch
+ return chunk, microbatch
one-tick-too-many
- self.stages + self.pipeline - 2
+ self.stages + self.pipeline - 1
bubble-counts-one-direction
- slots - 2 * self.tasks_per_rank, slots
+ slots - self.tasks_per_rank, slots
microbatches-multiple-of-virtual
- self.virtual > 1 and self.microbatches % self.pipeline
+ self.virtual > 1 and self.microbatches % self.virtual
one-task-too-many
- (number >= 0) & (number < self.tasks_per_rank)
+ (number >= 0) & (number <= self.tasks_per_rank)
first-runs-in-idle-slots
- return (self.forward_task(number)[0] == 0) & self.is_task(number)
+ return self.forward_task(number)[0] == 0
== sharded_model.py: model
balance-mean-over-own-sequences
- data.tokens.shape[1] * lax.axis_size(BATCH_AXES)
+ data.tokens.shape[1]
loss-mean-over-own-tokens
- total = lax.psum(data.loss_weights.sum(), BATCH_AXES)
+ total = lax.pmean(data.loss_weights.sum(), BATCH_AXES)
z-loss-reported-without-factor
- z = config.model.z_loss * log_z_sum
+ z = log_z_sum
evaluation-with-training-capacity
- forward_options(config, mesh, m.eval_capacity_factor)
+ forward_options(config, mesh, m.capacity_factor)
evaluation-balance-summed-over-layers: model validate
- scales(data, 1 / max(1, m.blocks * m.moe_layers))
+ scales(data, 1.0)
segments-not-used
- segments = data.segments if config.data.segments else None
+ segments = None
gradients-scattered-twice
- per_step = config.fsdp.gather == "step"
+ per_step = True
target-logit-at-least-0: model multiple_choice
- lax.pmax(jnp.where(is_target_nv, logits_nv, -jnp.inf).max(-1), VOCABULARY_AXES)
+ lax.pmax(jnp.where(is_target_nv, logits_nv, 0.0).max(-1), VOCABULARY_AXES)
loss-weights-not-used: model training
- data.loss_weights.reshape(-1) * token_scale
+ jnp.ones_like(data.loss_weights).reshape(-1) * token_scale
aux-loss-not-in-the-gradient
- loss = balance_scale * routing.partial_balance if routing else
+ loss = 0.0 * routing.partial_balance if routing else
dropout-in-evaluation
- capacity_factor: float, dropout: float = 0.0
+ capacity_factor: float, dropout: float = 0.5
== optimizer.py: training
first-learning-rate-0: main
- done = step.astype(jnp.float32) + 1
+ done = step.astype(jnp.float32)
lowest-rate-not-used: main
- low + (peak - low) * left)
+ peak * left)
cosine-of-twice-the-share: main
- jnp.cos(jnp.pi * share)
+ jnp.cos(2 * jnp.pi * share)
clip-norm-not-used
- optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity()
+ optax.identity()
decay-of-norms-and-biases
- lambda w: w.decay and (w.group != "embedding" or o.decay_embeddings), declared
+ lambda w: w.group != "embedding" or o.decay_embeddings, declared
beta2-not-used
- optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)
+ optax.scale_by_adam(o.beta1, eps=o.epsilon)
betas-exchanged
- optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)
+ optax.scale_by_adam(o.beta2, o.beta1, o.epsilon)
muon-update-by-shorter-side: muon
- longest = max(side_sizes(w, w.shape))
+ longest = min(side_sizes(w, w.shape))
newton-schulz-four-steps: muon
- ((3.4445, -4.7750, 2.0315),) * 5
+ ((3.4445, -4.7750, 2.0315),) * 4
muon-without-nesterov: muon
- momentum = optax.trace(beta, nesterov=True)
+ momentum = optax.trace(beta, nesterov=False)
unused-experts-updated: muon
- jnp.where(has_gradient(w, grad), update, 0) if w.active < 1 else update
+ update
newton-schulz-norm-of-rows: muon
- jnp.sum(x32 * x32, axis=(1, 2), keepdims=True)
+ jnp.sum(x32 * x32, axis=2, keepdims=True)
== train.py: training
spike-median-of-upper-half
- median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
+ median = ordered[count // 2]
skips-in-a-row-never-reset
- in_row = (state.skipped_in_row + 1) * skipped
+ in_row = state.skipped_in_row + skipped
infinite-gradient-applied
- finite = jnp.isfinite(stats.loss) & jnp.isfinite(norm)
+ finite = jnp.isfinite(stats.loss)
spike-moves-the-median
- applied, jnp.where(applied, later, norms), {"spike"
+ applied, jnp.where(finite, later, norms), {"spike"
router-bias-sign
- speed * jnp.sign(load.mean(-1, keepdims=True) - load)
+ speed * jnp.sign(load - load.mean(-1, keepdims=True))
router-bias-mean-over-layers
- load.mean(-1, keepdims=True) - load)
+ load.mean() - load)
devices-read-the-rows-of-the-first: main
- per_microbatch + np.arange(start, stop)
+ per_microbatch + np.arange(stop - start)
prefetch-one-less: dataset
- if len(pending) > depth:
+ if len(pending) >= depth:
resumed-run-reads-from-the-first-step: main
- return prefetch(batch, range(first_step, t.steps))
+ return prefetch(batch, range(t.steps))
weights-from-the-seed-of-the-data: training main
- weights.initialize(declared, mesh, config.train.seed)
+ weights.initialize(declared, mesh, config.data.seed)
planned-bytes-count-donated-results
- plan.output_size_in_bytes - plan.alias_size_in_bytes
+ plan.output_size_in_bytes
tensor-ranks-before-fsdp: main
- return -max(shape) if balanced else 0, fsdp, tensor
+ return -max(shape) if balanced else 0, tensor, fsdp
step-not-counted-if-skipped
- State(new, optimizer_state, state.step + 1, state
+ State(new, optimizer_state, state.step + 1 - skipped, state
== dataset.py: dataset
window-stride-with-the-target
- in (windows * self.seq_len).tolist():
+ in (windows * (self.seq_len + 1)).tolist():
one-window-too-many
- self.windows = (self.manifest.tokens - 1) // seq_len
+ self.windows = self.manifest.tokens // seq_len
epochs-in-the-same-order
- self.shuffle(windows[here], int(epoch))
+ self.shuffle(windows[here], 0)
data-seed-not-used
- np.random.SeedSequence([seed, epoch])
+ np.random.SeedSequence([epoch])
loss-weights-of-inputs: dataset chat token_files
- loss_weights[:, 1:].astype(np.float32)
+ loss_weights[:, :-1].astype(np.float32)
end-of-text-in-the-next-document
- segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1, dtype=np.int32)
+ segments[:] = np.cumsum(ends, axis=1, dtype=np.int32)
evaluation-windows-at-the-begin
- * self.windows // sequences)
+ * (self.windows // sequences))
striped-without-shuffling-chunks
- chunk = permute((group * rows + row)[~tail], chunks, seed, epoch)
+ chunk = (group * rows + row)[~tail]
mixture-counts-its-own-position: mixture
- self._before = np.cumsum(ones, axis=1) - ones
+ self._before = np.cumsum(ones, axis=1)
mixture-identity-without-shares: mixture
- json.dumps([*zip(self.counts.tolist(), each, strict=True)])
+ json.dumps(each)
mixture-epoch-message-late: mixture
- self._used(step - 1), self._used(step), strict=True)
+ self._used(step - 2), self._used(step - 1), strict=True)
mixture-in-one-block-per-dataset: mixture
- (np.arange(count) + 0.5) / count for count
+ (np.arange(count) + 0.5) / PERIOD for count
== checkpoint.py: checkpoint
digest-not-checked
- differ = [name for name in found if digests[name] != tuple(entries[name]["digest"])]
+ differ = []
record-checksum-not-checked
- return record if record.pop("crc32") == _crc32(record) else None
+ return record if record.pop("crc32") else None
one-checkpoint-too-many-kept
- self._files.steps()[: -self._keep]:
+ self._files.steps()[: -self._keep - 1]:
keep-every-steps-not-used
- if not self._keep_every or step % self._keep_every:
+ if step:
oldest-checkpoint-restored
- for step in reversed(steps):
+ for step in steps:
config-of-resumed-run-not-checked: checkpoint main
- check_config(record["config"], step)
+ pass
damaged-checkpoint-stays
- for other in damaged if is_primary() else []:
+ for other in []:
saved-step-replaced
- if step in steps:
+ if step in steps[:-1]:
failed-save-not-raised
- if self.failed(wait=is_complete):
+ if self.failed(wait=is_complete) and not is_complete:
older-step-saved-after-newer
- if steps and steps[-1] > step:
+ if steps and steps[0] > step:
== runtime/checkpoint_directory.py: checkpoint
checkpoint-complete-without-commit
- if n.isdigit() and self.is_complete(int(n)))
+ if n.isdigit())
quarantine-keeps-commit-for-last: buckets
- key=lambda name: name != f"{step}/{COMMIT}"
+ key=lambda name: name == f"{step}/{COMMIT}"
== runtime/array_digests.py: array_digests
digest-without-row
- position = mix(column ^ mix(row + SEED))
+ position = mix(column)
digest-start-of-words
- shape, start = (*shape, 2), 2 * start
+ shape, start = (*shape, 2), start
digest-sum-not-wrapped
- return sum(one) % (1 << 32), sum(other) % (1 << 32)
+ return sum(one) % (1 << 31), sum(other) % (1 << 31)
== runtime/stored_array.py: checkpoint convert
digest-of-parts-not-checked
- if array_digests.total(digests) != self.digest:
+ if not digests:
== main.py: main
stop-without-save
-                 self._check_replicas(state, step)
-             self._save(state, step)
-         self.watchdog
+                 self._check_replicas(state, step)
+         self.watchdog
last-save-not-waited-for
-                 saved.wait()
-             log(f"{plan_line}
+                 pass
+             log(f"{plan_line}
tokens-count-sequences
- "tokens": step * tokens,
+ "tokens": step * t.global_batch_size,
one-skip-too-many
- report["skipped_in_row"] < t.max_skipped_in_row:
+ report["skipped_in_row"] <= t.max_skipped_in_row:
windows-of-the-next-step
- self.train_data.windows_of(step - 1, rows)
+ self.train_data.windows_of(step, rows)
nothing-due-after-the-last-step
- return step == self.config.train.steps or (every > 0 and step % every == 0)
+ return every > 0 and step % every == 0
tokenizer-of-other-run-not-checked: resume
- resume.check_same_tokenizer(source, settings["tokens"], data.folder, data.manifest)
+ pass
new-run-not-evaluated-first
- return self.validation is not None, False
+ return False, False
saves-without-comparison
- self.replicas is not None and (save or step % every == 0)
+ self.replicas is not None and step % every == 0
samples-of-lost-steps-stay
- jsonl.truncate(file, self.first)
+ pass
balance-loss-recorded-as-z
- "loss/z": float(stats.z),
+ "loss/z": float(stats.balance),
== metrics.py: metrics
records-of-lost-steps-stay
- truncate(path, step)
+ pass
time-left-for-all-steps
- * max(self._steps - step, 0)
+ * self._steps
first-step-counts-in-time-left
- self._first = (now, step)
+ self._first = (now, step - 1)
sync-without-records-on-disk
- if self._unwritten:
-                 raise
+ if self._file.closed:
+                 raise
validation-loss-under-wrong-key
- {_number(record['loss/val'], '.4f')}
+ {_number(record['loss/val_balance'], '.4f')}
== validate.py: validate
bits-in-nats: validate mixture
- .rstrip("/")] / math.log(2)
+ .rstrip("/")]
padding-row-has-a-loss
- rows["loss_weights"][numbers >= sequences] = 0
+ rows["loss_weights"][numbers > sequences] = 0
mixture-mean-unweighted: mixture
- (share * np.array(r[name]) for
+ (np.array(r[name]) / len(records) for
dropped-share-of-one-layer: validate metrics model
- * m.num_experts_per_tok * m.blocks
+ * m.num_experts_per_tok
bytes-of-all-text: validate chat
- tokens = m.tokens if m.learned_tokens is None else m.learned_tokens
+ tokens = m.tokens
== generate.py: generate
prompt-fills-the-context
- if len(text) >= context:
+ if len(text) > context:
split-characters-printed-early
- codecs.getincrementaldecoder("utf-8")("replace")
+ codecs.getincrementaldecoder("utf-8")("ignore")
continuation-tokenized-as-a-begin
- text = encode_continuation(tokenizer, line)
+ text = begin + tokenizer.encode_ordinary(line)
batches-with-the-same-numbers
- generator.reset(range(len(texts))[batch], flags.seed)
+ generator.reset(range(len(texts[batch])), flags.seed)
generate-seed-not-used
- generator.reset(range(len(texts))[batch], flags.seed)
+ generator.reset(range(len(texts))[batch], 0)
== inference/sampling.py: sampling generate
top-p-off-by-one
- jnp.cumsum(p_BV, axis=-1) - p_BV < options.top_p
+ jnp.cumsum(p_BV, axis=-1) < options.top_p
top-k-off-by-one
- lax.top_k(logits_BV, min(options.top_k, logits
+ lax.top_k(logits_BV, min(options.top_k + 1, logits
temperature-multiplied
- logits_BV = logits_BV / options.temperature
+ logits_BV = logits_BV * options.temperature
same-sample-for-equal-texts
- jax.random.fold_in(jax.random.fold_in(key, number), position)
+ jax.random.fold_in(key, position)
only-first-end-of-text-ends
- np.isin(self.last, self.ends)
+ np.isin(self.last, self.ends[:1])
prefill-token-of-padding
- last_B1 = jnp.clip(count_B - 1,
+ last_B1 = jnp.clip(count_B,
full-text-continues
- ended |= full
+ pass
== inference/decode.py: decode
cache-position-off-by-one
- return past.start_b[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
+ return past.start_b[:, None] + 1 + jnp.arange(T, dtype=jnp.int32)[None, :]
cache-shows-one-position-more
- visible_bTs = (key_11s < past.start_b[:, None, None])
+ visible_bTs = (key_11s <= past.start_b[:, None, None])
decoding-window-one-longer
- return key_bTs > position_bT1 - window if window
+ return key_bTs >= position_bT1 - window if window
window-of-the-longest-text
- first = jnp.maximum(past.start_b.min() - window
+ first = jnp.maximum(past.start_b.max() - window
cache-read-up-to-shortest-text
- blocks = -(-past.start_b.max() // BLOCK)
+ blocks = -(-past.start_b.min() // BLOCK)
running-sum-not-rescaled
- self.sum_bTyg * scale_bTyg + p_bTygs.sum(-1)
+ self.sum_bTyg + p_bTygs.sum(-1)
experts-of-rank-by-blocks
- lax.axis_index(EXPERT_AXES) * experts.gate.shape[1]
+ lax.axis_index(EXPERT_AXES) * experts.gate.shape[0]
== inference/multiple_choice.py: multiple_choice
last-token-of-prompt-scored
- loss_weights[row, max(0, len(both) - 1 - len(text)) : len(both) - 1] = 1
+ loss_weights[row, max(0, len(both) - 2 - len(text)) : len(both) - 1] = 1
normalised-by-characters
- sizes = [len(choice.encode()) for choice in q.choices]
+ sizes = [len(choice) for choice in q.choices]
standard-error-of-n
- math.sqrt(p * (1 - p) / (n - 1))
+ math.sqrt(p * (1 - p) / n)
long-context-cut-at-the-end
- both = [*context, *text][-self.T - 1 :]
+ both = [*context, *text][: self.T + 1]
== utils.py: utils
warmup-longer-than-the-schedule: main
- warmup = min(self.warmup_steps, max(1, steps - 1))
+ warmup = self.warmup_steps
padding-of-a-full-vocabulary: weights hardware
- return -(-self.vocab_size // 256) * 256
+ return (self.vocab_size // 256 + 1) * 256
batch-without-replicas: utils training
- return self.replica * self.fsdp
+ return self.fsdp
dense-layers-with-the-moe-layer: weights
- return self.decoder_sparse_step - self.moe_layers
+ return self.decoder_sparse_step
== runtime/cli.py: utils
minutes-are-hours
- return 3600 * h + 60 * m + s
+ return 3600 * (h + m) + s
zero-allowed-everywhere
- low = 0 if name in MAY_BE_ZERO or type(value) is float else 1
+ low = 0
config-file-not-read
- default=Config(model=model or Model()) if path is None else load(path, model),
+ default=Config(model=model or Model()),
switch-false-is-true
- prefixes = {"true": "", "1": "", "false": "no_", "0": "no_"}
+ prefixes = {"true": "", "1": "", "false": "", "0": ""}
sequence-divides-over-fsdp: utils main
- ("train.seq_len", mesh.tensor, "--mesh.tensor"),
+ ("train.seq_len", mesh.fsdp, "--mesh.tensor"),
== runtime/resume.py: resume
data-settings-may-change
- FREE_SECTIONS = {"mesh", "fsdp", "eval",
+ FREE_SECTIONS = {"mesh", "fsdp", "data", "eval",
optimizer-settings-may-change
- FREE_SECTIONS = {"mesh", "fsdp", "eval",
+ FREE_SECTIONS = {"mesh", "fsdp", "optimizer", "eval",
schedule-follows-new-steps: main
- return utils.changed(config, {"optimizer.schedule_steps": length})
+ return config
decay-may-change-during-the-decay
- if name in DECAY_FIELDS and step <= before_decay:
+ if name in DECAY_FIELDS:
data-identity-not-compared
- if name == "tokens.train" and name not in old:
+ if name == "tokens.train":
records-without-checkpoints-removed: resume main
- if steps and 0 < steps[-1] - first >= allowed:
+ if steps and 0 < steps[-1] - first < 0:
== runtime/errors.py: errors
unavailable-is-a-bug
- TRANSIENT = "INTERNAL|UNAVAILABLE|
+ TRANSIENT = "INTERNAL|
config-error-exits-1
- return Exit.CONFIG if isinstance(error, ConfigError) else Exit.BUG
+ return Exit.BUG
compiler-error-is-retried
- if str(error).startswith("INTERNAL:"):
+ if str(error).startswith("INTERNAL ERROR:"):
message-anywhere-is-a-status
- re.match(f"({TRANSIENT}): ", str(error))
+ re.search(f"({TRANSIENT}): ", str(error))
== runtime/signals.py: signals
sighup-ignored
- numbers = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM]
+ numbers = [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM]
nohup-not-respected
- if signal.getsignal(number) != signal.SIG_IGN:
+ if number:
time-limit-without-margin
- - 1.2 * (work + save)
+ - work
interrupt-exits-143
- Exit.INTERRUPTED if alone else Exit.TERMINATED
+ Exit.TERMINATED
second-interrupt-ignored
- signal.signal(number, signal.SIG_DFL)  # so
+ pass  # so
slow-save-not-in-margin
- save = max(30.0, longest.get("save", 0.0), self.save_s)
+ save = max(30.0, longest.get("save", 0.0))
== runtime/watchdog.py: watchdog
suspend-counts-as-a-hang
- self._spent_s += min(passed_s, 2 * TICK_S)
+ self._spent_s += passed_s
hang-exits-1
- os._exit(Exit.RETRY)
+ os._exit(Exit.BUG)
phases-share-their-limit
- self.name, self._spent_s = name, 0.0
+ self.name = name
== runtime/writer_lock.py: writer_lock
shared-lock
- fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
+ fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
owner-not-compared
- other.get("owner") != own["owner"] and not take_over
+ not take_over
lock-taken-without-generation
- json.dumps(own).encode(), generation))
+ json.dumps(own).encode()))
== runtime/goodput.py: goodput
gap-after-the-end-is-down
- for a, b in itertools.pairwise(lines) if not a["ended"]]
+ for a, b in itertools.pairwise(lines)]
one-repeated-step-too-many
- and step < r["step"] <= last]
+ and step <= r["step"] <= last]
== runtime/jsonl.py: metrics main
nan-written-as-nan: metrics
- return json.loads(text, parse_constant=lambda name: None)
+ return json.loads(text)
truncate-removes-the-last-step: metrics
- if 0 < step >= record["step"]])
+ if 0 < step > record["step"]])
== runtime/run_directory.py: run_directory
changed-file-appended
- if old and old.size and crc32(content[: old.size]) == old.crc32:
+ if old and old.size:
upload-without-the-lock
- self.lock.check()
+ pass
== runtime/buckets.py: buckets
generation-not-required: buckets writer_lock
- "if_generation_match": if_generation_match, **_retried()}
+ "if_generation_match": None, **_retried()}
== runtime/replica_check.py: replica_check
half-is-a-majority
- if 2 * count > len(group) else group
+ if 2 * count >= len(group) else group
only-replicated-arrays-compared
- for name, first in firsts.items() if len(set(first)) < len(first)]
+ for name, first in firsts.items() if len(set(first)) == 1]
== runtime/distributed.py: distributed
highest-code-of-all-processes
- raise JobFailed(text, min(code for
+ raise JobFailed(text, max(code for
index-equal-to-count
- int(index) >= int(count):
+ int(index) > int(count):
slurm-steps-share-a-port
- port = 61440 + (job + step) % 4096
+ port = 61440 + job % 4096
== runtime/preflight.py: preflight
clock-behind-not-noticed
- abs(other_s - time_s) > MAX_SKEW_S
+ other_s - time_s > MAX_SKEW_S
exempt-hosts-go-through-the-proxy
- host.endswith(end.strip()) for end in direct
+ end.strip().endswith(host) for end in direct
== runtime/loggers.py: loggers
wandb-without-step
- self._run.log(sent, step=record["step"])
+ self._run.log(sent)
full-queue-without-a-warning
- self._fail(f"it does not take records; {BACKLOG_RECORDS} wait")
+ pass
== hardware.py: hardware
attention-flops-of-the-full-square
- keys = window * (1 - window / (2 * sequence_length))
+ keys = window
embedding-lookup-counts
- lookup = 0 if m.tie_word_embeddings else declared.first.embedding.size
+ lookup = 0
all-parameters-count
- _, active = weights.count(declared)
+ active, _ = weights.count(declared)
== plot.py: plot
balance-plotted-as-loss
- self.val = _column(val, "loss/val")
+ self.val = _column(val, "loss/val_balance")
evaluations-over-steps
- self.val_tokens = _column(val, "step") * self.tokens_per_step
+ self.val_tokens = _column(val, "step")
share-of-all-layers
- np.maximum(tokens.sum(-1, keepdims=True), 1.0)
+ np.maximum(tokens.sum((1, 2), keepdims=True), 1.0)
balance-of-one-layer
- factor = m.blocks * m.moe_layers * m.aux_loss_alpha
+ factor = m.moe_layers * m.aux_loss_alpha
== data/chat.py: chat
prompts-are-learned
- chunks += [Chunk(prompt, 0), Chunk(content + END, 1)]
+ chunks += [Chunk(prompt, 1), Chunk(content + END, 1)]
end-of-answer-not-learned
- chunks += [Chunk(prompt, 0), Chunk(content + END, 1)]
+ chunks += [Chunk(prompt, 0), Chunk(content, 1), Chunk(END, 0)]
answer-header-learned
- before = to_text(messages[:number], prompt=True)
+ before = to_text(messages[:number])
special-tokens-in-messages
- for name in pattern.finditer(text, begin, end):
+ for name in pattern.finditer(text, position, end):
shortest-special-token-first
- names = sorted(special.ids, key=len, reverse=True)
+ names = sorted(special.ids, key=len)
== data/encode.py: prepare
special-token-recognized-in-text
- self.tokenizer.encode_to_numpy(chunk.text, disallowed_special=())
+ self.tokenizer.encode_to_numpy(chunk.text, allowed_special="all")
end-of-text-omitted
- if previous is not None and document.ends:
+ if previous is not None and not document.ends:
begin-of-text-before-each-chunk: chat
- if previous is None and self.bos not in (None, *ids[:1]):
+ if self.bos not in (None, *ids[:1]):
end-of-text-not-learned: chat
- yield np.array([self.tokenizer.eot_token]), weight, 0
+ yield np.array([self.tokenizer.eot_token]), weight and 0, 0
row-padding-too-long: chat
- np.full(-length % self.row_tokens,
+ np.full(-(length + 1) % self.row_tokens,
learned-tokens-count-all: chat
- subset.learned_tokens += len(ids) if weight is None else weight * len(ids)
+ subset.learned_tokens += len(ids)
large-vocabulary-in-16-bits: prepare hf_tokenizer
- np.uint16 if self.tokenizer.n_vocab <= 2**16
+ np.uint16 if self.tokenizer.n_vocab <= 2**17
== data/settings.py: prepare
validation-share-doubled
- int.from_bytes(digest[:8], "big") < share * 2**64
+ int.from_bytes(digest[:8], "big") < share * 2**65
validation-by-file-alone
- hashlib.sha256(f"{name}:{position}".encode(
+ hashlib.sha256(f"{name}".encode(
== data/readers.py: inputs prepare
line-at-the-split-skipped
- file.seek(byte - 1)
+ file.seek(byte)
byte-order-mark-in-the-text
- return len(BOM) if file.read(len(BOM)) == BOM else file.seek(0)
+ return file.seek(0)
changed-file-read
- size_and_checksum(part.path)[1] != part.identity:
+ size_and_checksum(part.path)[1] == "":
== data/prepare.py: prepare
all-shards-removed-at-the-end
- kept = {f"{name}/{file.name}" for name in totals for file
+ kept = {f"{file.name}" for name in totals for file
all-splits-despite-max-tokens
- left -= done[split].tokens
+ left -= 0
== data/manifest.py: dataset token_files
identity-without-tokenizer: dataset
- content = [self.tokenizer_sha256, self.dtype, files]
+ content = [self.dtype, files]
token-count-not-checked: dataset
- if manifest.tokens != sum(shard.tokens for shard in shards):
+ if manifest.tokens < 0:
== data/token_files.py: token_files
truncated-shard-accepted: token_files dataset
- if size != shard.bytes:
+ if size > shard.bytes:
short-answer-of-a-bucket-accepted
- if len(content) != end - begin:
+ if len(content) > end - begin:
chunk-beyond-the-end-of-a-file
- (path, n, min(n + size, last)) for n
+ (path, n, n + size) for n
== data/verify.py: token_files
checksum-not-compared
- return None if crc32c == shard.crc32c else
+ return None if crc32c else
== data/hf_tokenizer.py: hf_tokenizer
special-text-is-special
- table.encode_special_tokens = True  # as text
+ table.encode_special_tokens = False
space-lost-in-decoding
- spelling.replace(SPACE, " ").encode()
+ spelling.replace(SPACE, "").encode()
continuation-with-a-space
- return encode(self.table if has_prefix else self.inner, text)
+ return encode(self.table, text)
== data/tokenizer.py: chat generate convert
hash-without-end-of-text: hf_tokenizer prepare
- json.dumps([pattern, table, tokenizer.eot_token, *specials])
+ json.dumps([pattern, table, *specials])
tokenizer-hash-not-compared: generate prepare resume
- if sha256 is not None and found != sha256:
+ if sha256 is not None and not found:
== hf/tensors.py: convert
export-not-transposed
- return w.reshape(math.prod(w.shape[: self.input_dims]), -1).T
+ return w.reshape(math.prod(w.shape[: self.input_dims]), -1)
rotary-columns-not-inverted
- w = w[..., np.argsort(self._columns())]
+ w = w[..., self._columns()]
expert-number-of-the-layer
- layer + pattern.format(index[-1])
+ layer + pattern.format(index[0])
moe-layer-of-a-block-first
- (index[1] if part == "dense" else m.dense_layers)
+ (index[1] if part == "dense" else 0)
router-bias-rounded
- np.dtype(np.float32) if mapping.name.endswith("moe.bias") else dtype
+ dtype
== hf/families.py: convert
query-bias-under-the-name-of-keys
- "attention.query_bias": "self_attn.q_proj.bias"
+ "attention.query_bias": "self_attn.k_proj.bias"
gate-and-up-exchanged
- "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight"
+ "moe.experts.up": "block_sparse_moe.experts.{}.w1.weight"
biases-not-exported
- QWEN2: Family("Qwen2ForCausalLM", DENSE | GROUPED | BIASES)
+ QWEN2: Family("Qwen2ForCausalLM", DENSE | GROUPED)
== hf/import_checkpoint.py: convert
float8-divided-by-the-scale
- return w * scale.read()
+ return w / scale.read()
missing-tensors-accepted
- missing = [name for name in expected if name not in tensors]
+ missing = []
extra-layers-accepted
- and not _is_unused(name, found)
+ and name.endswith(".bias")
== hf/model_config.py: convert
mixtral-weights-not-normalized
- "norm_topk_prob": mixtral or bool(table.get("norm_topk_prob", False))
+ "norm_topk_prob": bool(table.get("norm_topk_prob", False))
mixtral-default-theta
- _rope(table, path, 1e6 if kind == MIXTRAL else 1e4)
+ _rope(table, path)
export-without-window
- "sliding_window": m.sliding_window or None,
+ "sliding_window": None,
context-not-extended
- length = int(m.rope_scaling.original_max_position_embeddings * m.rope_scaling.factor)
-         yarn
+ length = m.rope_scaling.original_max_position_embeddings
+         yarn
== hf/modeling_latent_moe.py: modeling
exported-model-weights-of-biased-scores
- weight = scores.gather(1, choice)
+ weight = ranked.gather(1, choice)
exported-model-halves-for-pairs
- a, b = x[..., 0::2].float(), x[..., 1::2].float()
+ a, b = x.float().chunk(2, dim=-1)
exported-model-heads-tiled
- (a.repeat_interleave(self.heads // self.key_heads, dim=1) for a in (k, v))
+ (a.repeat(1, self.heads // self.key_heads, 1, 1) for a in (k, v))
== hf/safetensors_files.py: convert
offsets-from-the-begin-of-the-file
- tuple(e["shape"]), start + e["data_offsets"][0])
+ tuple(e["shape"]), e["data_offsets"][0])
truncated-file-accepted
- if size < end:
+ if size < 8 + length:
== planning/cost.py: cost
weights-at-rest-in-compute-dtype
- parts["weights"] += w.own * FLOAT
+ parts["weights"] += w.own * w.byte
backward-like-forward
- return 3 * (last + step.useful
+ return 2 * (last + step.useful
one-idle-tick-too-many
- (self.schedule.tasks_per_rank + mesh.pipeline - 1) * self.chunk_blocks
+ (self.schedule.tasks_per_rank + mesh.pipeline) * self.chunk_blocks
optimizer-state-read-only
- 4 * FLOAT * own + 2 * step.optimizer_bytes
+ 4 * FLOAT * own + step.optimizer_bytes
sends-of-one-direction
- sends = 2 * ticks - (step
+ sends = ticks - (step
== planning/results.py: cost plan
all-reduce-sent-once: cost plan collectives
- (2 if self.kind == "all-reduce" else 1)
+ 1
all-memory-usable
- return math.inf if chip is None else USABLE * chip.memory_bytes
+ return math.inf if chip is None else chip.memory_bytes
serial-time-without-links
- max(self.seconds["compute"], self.seconds["memory"]) + links
+ max(self.seconds["compute"], self.seconds["memory"], links)
== planning/hlo.py: hlo
loop-from-its-first-count
- return limits.pop() - first_count(loop, counters[0], computation)
+ return limits.pop()
product-without-additions
- return 2 * math.prod(instruction.shapes[0][1]) * summed
+ return math.prod(instruction.shapes[0][1]) * summed
blocks-below-the-diagonal
- pairs = T * T * (rows + 1) // (2 * rows)
+ pairs = T * T // 2
read-and-write-of-an-update: hlo
- return 2 * result_bytes(operands[UPDATES[kernel.opcode]])
+ return result_bytes(operands[UPDATES[kernel.opcode]])
packed-types-rounded-down
- return -(-math.prod(dims) * bits // 8)
+ return math.prod(dims) * bits // 8
== planning/jaxpr.py: jaxpr cost
contracted-length-of-the-result: jaxpr
- math.prod(shapes[0][dim] for dim in summed)
+ math.prod(shapes[1][dim] for dim in summed)
peak-frees-before-it-allocates
- live + size - over + inside + _scratch(op)
+ live + size - over + _scratch(op)
== planning/fusion.py: fusion
slices-move-once: fusion cost
- return 2 if self.of(value) in self.whole else 0
+ return 1 if self.of(value) in self.whole else 0
loop-body-once
- self.bytes = self.bytes + op.times * inside.bytes
+ self.bytes = self.bytes + inside.bytes
== planning/collectives.py: collectives
ring-sends-all-parts
- share = whole * (ranks - 1) / ranks / (links * chip.link_bandwidth)
+ share = whole / (links * chip.link_bandwidth)
all-reduce-in-one-pass
- passes = 2 if kind == "all-reduce" else 1
+ passes = 1
== planning/search.py: search
smallest-candidate-chosen
- return min(fit, key=lambda candidate: candidate.order)
+ return min(fit, key=lambda candidate: candidate.memory)
fixed-flags-not-kept
- for flag in fixed & choices.keys():
+ for flag in ():
== planning/timeline.py: timeline
recomputed-is-backward
- direction = "recomputed" if "rematted_computation" in words else direction
+ direction = direction
== run.sh: run
flags-of-the-user-replaced
- [[ " ${XLA_FLAGS:-}" == *" ${flag%%=*}="* ]] || XLA_FLAGS=
+ XLA_FLAGS=
changed-lock-not-installed
- cmp -s "locks/$lock.txt" ".venv/.locks/$lock.txt" || return
+ [[ -e .venv/.locks/$lock.txt ]] || return
exit-code-lost
-   exec "$@"
- }
+   "$@" || true
+ }
old-driver-accepted
- ((driver < 525))
+ ((driver < 400))
interrupted-update-accepted
-   touch .venv-unfinished
-   rm -rf .venv/.locks
+   rm -rf .venv/.locks
user-packages-first
- export PIP_USER=0
+ export PIP_USER=1
set-up-without-lock
- flock 9
+ true
== launch/worker.sh: launcher
lost-processes-of-earlier-starts
- { if (ended) split("", lost); ended = 1 }
+ { ended = 1 }
unreachable-coordinator-not-named
- CoordinationService\/Heartbeat/ { lost[0] }
+ CoordinationService\/Heartbeat/ { next }
== launch/hosts.sh: launcher
host-listed-twice
- [[ " ${addresses[*]} " != *" $address "* ]]
+ [[ " ${hosts[*]} " != *" $line "* ]]
last-line-without-end-ignored
- while IFS= read -r line || [[ $line ]]; do
-     count
+ while IFS= read -r line; do
+     count
link-not-followed
- root=$(dirname "$path")
+ root=$(dirname "$0")
== launcher.sh: launcher
numbers-not-checked
- for option in keep-alive window pause wait port; do
+ for option in window pause wait port; do
quote-without-its-end-accepted
- elif [[ $value == [\"\']* ]]; then
+ elif [[ $value == \"* ]]; then
== launch/jobset.yaml: jobset
config-error-restarts-the-pods
- values: [1, 2]
+ values: [1]
no-time-to-save
- terminationGracePeriodSeconds: 600
+ terminationGracePeriodSeconds: 30
failed-pod-restarts-alone
- restartPolicy: Never
+ restartPolicy: OnFailure
one-process-too-few
- parallelism: 2
+ parallelism: 1
"""


def parse(text: str) -> Iterator[Fault]:
    """Yield the faults of a table like FAULTS."""
    file, common, name, tests, old, new = "", "", "", "", [], []
    for line in [*text.strip().splitlines(), "== end:"]:
        if line.startswith(("- ", "+ ")):
            (old if line[0] == "-" else new).append(line[2:])
            continue
        if old:
            files = tuple(f"tests/test_{test}.py" for test in (tests or common).split())
            yield Fault(name, file, "\n".join(old), "\n".join(new), files)
            old, new = [], []
        if line.startswith("== "):
            file, common = line[3:].split(":")
        else:
            name, _, tests = line.partition(":")


def problems() -> list[str]:
    """Return the faults that do not apply to one place, end the syntax, or lack a name or tests."""
    found, names = [], [fault.name for fault in parse(FAULTS)]
    for f in parse(FAULTS):
        text = (ROOT / f.file).read_text(encoding="utf-8")
        if (count := text.count(f.old)) != 1 or names.count(f.name) != 1 or f.old == f.new:
            found.append(f"{f.name}: its old text occurs {count} times, or its name twice")
        found += [f"{f.name}: no file {test}" for test in f.tests if not (ROOT / test).is_file()]
        if f.file.endswith(".py"):
            ast.parse(text.replace(f.old, f.new), f.name)
    return found


def key_of(fault: Fault, marks: str | None) -> str:
    """Return a hash of what determines a result."""
    files = [(ROOT / name).read_text(encoding="utf-8") for name in (fault.file, *fault.tests)]
    return hashlib.sha256(json.dumps([fault, marks, files]).encode()).hexdigest()[:16]


def copy_tree(tree: Path) -> None:
    """Clone the repository and copy what is not committed. Ignored files are not copied."""
    run = {"cwd": ROOT, "check": True, "stdout": subprocess.PIPE, "text": True}
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], **run)
    command = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(command, **run).stdout.split("\0")):
        (tree / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    for name in (".venv", ".cache"):
        (tree / name).symlink_to(ROOT / name)


def result(fault: Fault, marks: str | None) -> dict:
    """Apply a fault to a copy of the tree and run its tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        tree, log = Path(folder, "tree"), Path(folder, "log")
        copy_tree(tree)
        text = (tree / fault.file).read_text(encoding="utf-8")
        (tree / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [*PYTEST, "--basetemp", f"{folder}/tmp", *fault.tests]
        command += [] if marks is None else ["-m", marks]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=tree, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # children too
                process.wait()
        text = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.MULTILINE)
    if not failed and code in range(1, 6):  # such as no test, or a wrong argument
        raise RuntimeError(f"{fault.name}: pytest ended with {code}:\n{text[-3000:]}")
    how = "" if code == 0 else "time limit" if code is None else f"exit code {code}"
    found = {"name": fault.name, "file": fault.file, "caught": code != 0}
    found |= {"test": failed[1] if failed else how, "s": round(time.monotonic() - began, 1)}
    return found | {"key": key_of(fault, marks)}


def run_all(faults: list[Fault], marks: str | None, jobs: int) -> list[dict]:
    """Return the results of all faults; run those without one."""
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a+") as record, ThreadPoolExecutor(jobs) as pool:
        record.seek(0)
        done = {found["key"]: found for found in map(json.loads, record)}
        todo = [fault for fault in faults if key_of(fault, marks) not in done]
        for found in pool.map(lambda fault: result(fault, marks), todo):
            done[found["key"]] = found
            record.write(json.dumps(found) + "\n")
            record.flush()
            what = found["test"] if found["caught"] else "SURVIVED"
            print(f"{found['s']:7.1f} s  {found['name']}: {what}", flush=True)
    return [done[key_of(fault, marks)] for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--files", nargs="+", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--marks", metavar="EXPR", help='pytest -m EXPR; "" runs all tests')
    flags = parser.parse_args()
    wrong, faults = problems(), [*parse(FAULTS)]
    print(*wrong, f"{len(faults)} faults in {len({f.file for f in faults})} files", sep="\n")
    if flags.check or wrong:
        sys.exit(bool(wrong))
    faults = [f for f in faults if not flags.only or f.name in flags.only]
    faults = [f for f in faults if not flags.files or f.file in flags.files]
    found = run_all(faults, flags.marks, flags.jobs)
    caught, minutes = sum(r["caught"] for r in found), sum(r["s"] for r in found) / 60
    for r in found:
        if not r["caught"]:
            print(f"survived: {r['name']} ({r['file']})")
    print(f"caught {caught} of {len(found)} faults, in {minutes:.0f} minutes of tests")
    sys.exit(caught < ENOUGH * len(found))


if __name__ == "__main__":
    main()
