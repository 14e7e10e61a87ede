"""Text generation with a cache: token sampling, batched generation, and samples during training.

inference/decode.py runs the model. Letters: B sequences, T positions, V vocabulary.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from data.manifest import Manifest
from data.tokenizer import check_ids, load_tokenizer, special_of, text_of
from inference import decode
from model import Transformer
from runtime import distributed, errors
from runtime.console import log
from runtime.errors import Exit, JobFailed
from utils import MESH_AXES, Config, ConfigError

MAX_PREFILL_TOKENS = 512  # positions of each prompt in one pass through the model
ENDED = -1  # replaces the tokens of a text that has ended


class SamplingOptions(NamedTuple):
    """How the next token is sampled."""

    temperature: float  # 0 takes the most likely token
    top_k: int = 0  # sample from this many most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability


def sample_tokens(
    logits_BV: jax.Array,
    key: jax.Array,
    number_B: jax.Array,
    position_B: jax.Array,
    options: SamplingOptions,
) -> jax.Array:
    """Sample one token per row, [B].

    A token depends on key, number of the text and position, and not on the rest of the batch.
    """
    if options.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV / options.temperature
    if options.top_k:
        least_B1 = lax.top_k(logits_BV, min(options.top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if options.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        p_BV = jax.nn.softmax(sorted_BV)
        is_in_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < options.top_p  # more likely ones have less
        least_B1 = jnp.where(is_in_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)

    def one(number: jax.Array, position: jax.Array, logits_V: jax.Array) -> jax.Array:
        own_key = jax.random.fold_in(jax.random.fold_in(key, number), position)
        return jax.random.categorical(own_key, logits_V).astype(jnp.int32)

    return jax.vmap(one)(number_B, position_B, logits_BV)


class Generator:
    """Continues a batch of texts with one cache. Compiles a program per number of new tokens."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        sequences: int,
        max_length: int,
        ends: Sequence[int],
        options: SamplingOptions,
    ):
        """config      from decode.decoding_config.
        sequences   texts of a batch; the batch B is rounded up to a multiple of --mesh.fsdp.
        max_length  tokens of a text that the cache has space for.
        ends        tokens that end a text.
        """
        self.max_length, self.ends = max_length, list(ends)
        self.vocab_size = config.model.vocab_size
        self.B = -(-sequences // config.mesh.fsdp) * config.mesh.fsdp
        declared = model.declare(config)
        self.abstract_weights = decode.abstract_weights(config, declared, mesh)
        self.abstract_cache = decode.abstract_cache(config, mesh, self.B, max_length)
        self.convert_weights = decode.weight_converter(self.abstract_weights)
        extend = decode.extend(config, declared, mesh)

        def append(w: Any, cache: Any, *arguments: jax.Array) -> tuple:
            """Return the token after each text that ends in these tokens; keep the others' one."""
            tokens_BT, start_B, count_B, key, number_B, token_B = arguments
            tokens_BT = tokens_BT.reshape(self.B, -1)
            last_B1 = jnp.clip(count_B - 1, 0, tokens_BT.shape[1] - 1)[:, None]
            logits_B1V, cache = extend(w, cache, tokens_BT, start_B, count_B, last_B1)
            new_B = sample_tokens(logits_B1V[:, 0], key, number_B, start_B + count_B, options)
            ends_B = (count_B > 0) & (count_B <= tokens_BT.shape[1])
            return jnp.where(ends_B, new_B, token_B), cache

        self.replicated = NamedSharding(mesh, P())
        shardings = self.replicated, jax.tree.map(lambda a: a.sharding, self.abstract_cache)
        self._append = jax.jit(append, donate_argnums=1, out_shardings=shardings)
        self.programs: dict[int, Any] = {}  # compiled ones, by the tokens of each text

    def lower(self, T: int) -> Any:
        """Lower the program that appends T tokens to each text."""
        array = partial(jax.ShapeDtypeStruct, sharding=self.replicated)
        key = jax.eval_shape(lambda: jax.random.key(0))
        key, B = array(key.shape, key.dtype), array((self.B,), jnp.int32)
        rows = array((self.B, T), jnp.int32) if T > 1 else B, B, B, key, B, B
        return self._append.lower(self.abstract_weights, self.abstract_cache, *rows)

    def _run(self, w: Transformer, tokens: Any, start_B: Any, count_B: Any, token_B: Any) -> Any:
        """Append tokens, [B, T] or [B], and return the next token of each text."""
        program = self.programs.get(tokens.size // self.B, self._append)
        self.written = max(self.written, int((start_B + count_B).max()))
        rows = tokens, start_B, count_B, self.key, self.number, token_B
        token_B, self.cache = program(w, self.cache, *rows)
        return token_B

    def reset(self, numbers: Sequence[int], seed: int) -> None:
        """Empty the cache. The sampled tokens of a text depend on its number and the seed."""
        self.number = np.resize(np.asarray(numbers, np.int32), self.B)
        self.key = jax.random.key(seed)
        self.cache = decode.empty_cache(self.abstract_cache)
        self.written = 0  # positions in the cache, with those before a rewind
        self.rewind(0)

    def rewind(self, length: int) -> int:
        """Keep this many positions of each text in the cache, and return how many.

        None are kept if newer positions have overwritten some that a window would still show.
        """
        for window, (array, *_) in self.abstract_cache.items():
            if window and self.written - array.shape[2] > max(0, length - window + 1):
                length = 0
        self.written = self.written if length else 0
        self.length = np.full(self.B, length, np.int32)  # positions in the cache
        self.last = np.full(self.B, ENDED, np.int32)  # sampled tokens that are not in the cache yet
        return length

    def prefill(self, w: Transformer, texts: Sequence[Sequence[int]]) -> jax.Array:
        """Append at least one token to each text; return the tokens sampled after them, [B]."""
        check_ids(texts, self.vocab_size)
        pending = [[t] if t != ENDED else [] for t in self.last.tolist()]
        texts = [old + list(new) for old, new in zip(pending, texts, strict=False)]
        texts += [self.ends[:1]] * (self.B - len(texts))
        left_B = np.array([len(text) for text in texts], np.int32)
        T = prefill_tokens(int(left_B.max()))
        token_B = np.zeros(self.B, np.int32)
        for start in range(0, int(left_B.max()), T):
            tokens_BT = np.zeros((self.B, T), np.int32)
            for row, text in enumerate(texts):
                part = text[start : start + T]
                tokens_BT[row, : len(part)] = part
            token_B = self._run(w, tokens_BT, self.length + start, left_B - start, token_B)
        self.length += left_B
        return token_B

    def generate(
        self, w: Transformer, texts: Sequence[Sequence[int]], tokens: int
    ) -> Iterator[np.ndarray]:
        """Yield the next token of each text [B], at most `tokens` times.

        A text that has ended, or has reached the maximum length, yields ENDED. Stops when all have.
        """
        token_B = self.prefill(w, texts)
        ended = np.arange(self.B) >= len(texts)
        for count in range(1, tokens + 1):
            position, next_B = self.length, None
            full = position >= self.max_length
            if count < tokens and not (ended | full).all():
                # Dispatched before the last token is read, so that the device does not wait.
                next_B = self._run(w, token_B, position, np.ones(self.B, np.int32), token_B)
            self.last = np.asarray(token_B)
            ended |= np.isin(self.last, self.ends)
            yield np.where(ended, ENDED, self.last)
            ended |= full
            if ended.all() or next_B is None:
                return
            token_B, self.length = next_B, np.where(full, position, position + 1)


def prefill_tokens(longest: int) -> int:
    """Return how many tokens of each text are appended at once, for few shapes to compile."""
    return min(1 << max(3, (longest - 1).bit_length()), MAX_PREFILL_TOKENS)


def generation_mesh(config: Config, mesh: Mesh) -> tuple[Config, Mesh]:
    """Return config and mesh to decode on the same devices: all axes but tensor join fsdp."""
    config = decode.decoding_config(config, math.prod(config.mesh.shape[:-1]), config.mesh.tensor)
    devices = mesh.devices.reshape(config.mesh.shape)
    return config, Mesh(devices, MESH_AXES, axis_types=mesh.axis_types)


def for_samples(config: Config, mesh: Mesh, length: int, ends: Sequence[int]) -> Generator:
    """Return the generator of texts of a length for the prompts of [sample]."""
    options = SamplingOptions(config.sample.temperature)
    prompts = len(config.sample.prompts)
    return Generator(*generation_mesh(config, mesh), prompts, length, ends, options)


class Sampler:
    """Continues the prompts of [sample] during training, on the devices of the training mesh."""

    def __init__(self, config: Config, mesh: Mesh, manifest: Manifest):
        """Raises  ConfigError if the model cannot be sharded so."""
        s, T = config.sample, config.train.seq_len
        self.prompts, self.tokens = s.prompts, min(s.tokens, T - 1)
        self.tokenizer = load_tokenizer(manifest.tokenizer, manifest.tokenizer_sha256)
        begin = [] if manifest.begin_of_text is None else [manifest.begin_of_text]
        ids = [begin + self.tokenizer.encode_ordinary(prompt) for prompt in self.prompts]
        left = max(1, T - self.tokens)
        self.texts = [text[-left:] or [manifest.end_of_text] for text in ids]
        check_ids(self.texts, config.model.vocab_size)
        max_length = max(map(len, self.texts)) + self.tokens
        ends = [manifest.end_of_text, *special_of(self.tokenizer).ends]
        self.generator = for_samples(config, mesh, max_length, ends)
        self.convert_weights: Any = self.generator.convert_weights

    def lower(self, w: Any) -> dict[int | str, Any]:
        """Lower the conversion of weights of these shapes, as "weights", and the programs that
        append a prompt and a token, by the tokens of each text.
        """
        lengths = prefill_tokens(max(map(len, self.texts))), 1
        programs = {T: self.generator.lower(T) for T in lengths}
        return programs | {"weights": self.convert_weights.lower(w)}

    def __call__(self, w: Transformer, step: int) -> list[dict[str, Any]]:
        """Return {"step", "prompt", "text"} for each prompt."""
        self.generator.reset(range(len(self.prompts)), step)
        w = self.convert_weights(w)
        tokens = np.array([*self.generator.generate(w, self.texts, self.tokens)])
        self.generator.cache = None  # frees its memory for the next step
        return [
            {"step": step, "prompt": prompt, "text": text_of(self.tokenizer, ids)}
            for prompt, ids in zip(self.prompts, tokens.T.tolist(), strict=False)
        ]


def make_sampler(config: Config, mesh: Mesh, manifest: Manifest) -> Sampler | None:
    """Return the sampler; None without prompts, or if the model cannot be sharded to sample."""
    if not config.sample.prompts:
        return None
    try:
        with distributed.shared_errors():
            return Sampler(config, mesh, manifest)
    except (ConfigError, JobFailed) as error:
        if errors.code_of(error) == Exit.BUG:
            raise
        log(f"no samples: {error}")
        return None


def as_log(sample: dict[str, Any]) -> str:
    """Format a sample as lines: its prompt and completion, indented, with control characters, which
    a terminal would obey, as escapes.
    """
    text = sample["prompt"] + sample["text"]
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    indented = textwrap.indent(text, "    ")
    return f"step {sample['step']}, a completion of {sample['prompt']!r}:\n{indented}"
