"""Samples of text during training.

Letters: M microbatches, B sequences of one, T positions, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import passes
from data.tokenizer import load_tokenizer
from dataset import Dataset
from model import Batch, Transformer
from utils import Config


class Sampler:
    """Continues prompts: a whole forward pass over the padded sequence for each new token."""

    def __init__(self, config: Config, declared: Transformer, mesh: Mesh, data: Dataset):
        m = data.manifest
        self.config, self.mesh = config, mesh
        self.tokenizer = load_tokenizer(m.tokenizer, m.tokenizer_sha256)
        self.end_of_text = m.end_of_text
        mesh_sizes, prompts = config.mesh, config.sample.prompts
        # Interleaved stages take microbatches in groups of one per rank.
        self.M = mesh_sizes.pipeline if mesh_sizes.virtual > 1 else 1
        self.B = -(-len(prompts) // (self.M * mesh_sizes.fsdp)) * mesh_sizes.fsdp
        train = dataclasses.replace(config.train, microbatches=self.M)
        logits = passes.logits(dataclasses.replace(config, train=train), declared, mesh)
        self.next = jax.jit(
            partial(self._next, logits), donate_argnums=1, out_shardings=NamedSharding(mesh, P())
        )

    def _next(
        self, logits: Callable, w: Transformer, tokens: jax.Array, at: jax.Array, key: jax.Array
    ) -> jax.Array:
        """tokens [M, B, T] with the token after position `at` [M, B] drawn from the model."""
        zeros = jnp.zeros_like(tokens)
        batch = Batch(tokens, zeros, zeros.astype(jnp.float32), zeros)
        logits_MBV = logits(w, batch, at[..., None])[:, :, 0]
        drawn = logits_MBV.argmax(-1)
        if temperature := self.config.sample.temperature:
            drawn = jax.random.categorical(key, logits_MBV / temperature)
        # A row that is full keeps its last token.
        position = jnp.arange(tokens.shape[-1])[None, None, :]
        return jnp.where(position == at[..., None] + 1, drawn[..., None].astype(jnp.int32), tokens)

    def __call__(self, w: Transformer, step: int) -> list[dict[str, Any]]:
        """For each prompt {"step", "prompt", "text"}."""
        T, new = self.config.train.sequence_length, self.config.sample.tokens
        prompts = self.config.sample.prompts
        ids = [self.tokenizer.encode_ordinary(p)[-max(1, T - new) :] for p in prompts]
        ids = [i or [self.end_of_text] for i in ids]
        tokens = np.zeros((self.M * self.B, T), np.int32)
        length = np.ones(self.M * self.B, np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)], length[row] = prompt, len(prompt)
        whole = NamedSharding(self.mesh, P())
        shape = (self.M, self.B)
        out = jax.device_put(tokens.reshape(*shape, T), whole)
        key = jax.random.key(step)
        for i in range(min(new, T - 1)):
            at = np.minimum(length + i, T) - 1
            out = self.next(w, out, at.reshape(shape), jax.random.fold_in(key, i))
        out = np.asarray(out).reshape(-1, T)
        return [
            {
                "step": step,
                "prompt": prompt,
                "text": self._text(out[row, len(ids[row]) : length[row] + new]),
            }
            for row, prompt in enumerate(prompts)
        ]

    def _text(self, ids: np.ndarray) -> str:
        """Up to the end of the document."""
        ends = np.flatnonzero(ids == self.end_of_text)
        ids = ids[: ends[0]] if len(ends) else ids
        return self.tokenizer.decode([int(i) for i in ids if i < self.tokenizer.n_vocab])
