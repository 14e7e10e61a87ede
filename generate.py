"""Text from a model: of any checkpoint on the command line, and of a run while it trains.

    ./run.sh python generate.py --run runs/tiny --prompt "def "
    ./run.sh python generate.py --run runs/tiny --prompts prompts.txt --temperature 0
    ./run.sh python generate.py --run runs/tiny --interactive

Text appears as it is made; tokens per second and the time to the first token stand at its end, on
the error stream. Takes main.py's flags as well, over the run's own config; it runs on one device
unless these give a mesh, as --mesh.fsdp 4 --mesh.tensor 2. How the model runs is decode.py's
concern.

Letters: B sequences, T positions, V vocabulary.
"""

import codecs
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import decode
import faults
import model
import multihost
import resume
import run_folder
import train
import utils
from data.tokenizer import Tokenizer, load_tokenizer, text_of, token_bytes
from metrics import is_primary
from mixture import Mixture
from model import Transformer
from utils import GIB, MESH_AXES, Config

MOST_AT_ONCE = 512  # positions of a prompt that go through the model together
ENDED = -1  # in place of a token, of a text that has ended


class Drawing(NamedTuple):
    """How the next token is chosen."""

    temperature: float  # 0 takes the likeliest
    top_k: int = 0  # of so many likeliest; 0: of all
    top_p: float = 1.0  # of the likeliest that together have this probability


def draw(
    logits_BV: jax.Array, key: jax.Array, number_B: jax.Array, at_B: jax.Array, how: Drawing
) -> jax.Array:
    """A token [B] of each row's distribution; the same for the same key, number of the text and
    position, whatever else is in the batch.
    """
    if how.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV / how.temperature
    if how.top_k:
        least_B1 = lax.top_k(logits_BV, min(how.top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if how.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        p_BV = jax.nn.softmax(sorted_BV)
        is_in_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < how.top_p  # those before have less
        least_B1 = jnp.where(is_in_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)

    def one(number: jax.Array, at: jax.Array, logits_V: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, number), at)
        return jax.random.categorical(own, logits_V).astype(jnp.int32)

    return jax.vmap(one)(number_B, at_B, logits_BV)


class Writer:
    """Reads texts and continues them, `sequences` at once, in one cache. Two programs are compiled
    for it: one reads, one writes a token.
    """

    def __init__(
        self, config: Config, mesh: Mesh, sequences: int, room: int, end_of_text: int, how: Drawing
    ):
        """config     on a mesh to decode on (decode.config_of).
        sequences  texts, of which fsdp ranks have as many each.
        room       most tokens of a text.
        """
        self.config, self.mesh, self.end_of_text, self.room = config, mesh, end_of_text, room
        self.B = -(-sequences // config.mesh.fsdp) * config.mesh.fsdp
        declared = model.declare(config)
        self.ready = decode.ready(config, declared, mesh)
        extend = decode.extend(config, declared, mesh)
        whole, cut = (NamedSharding(mesh, spec) for spec in (P(), decode.CACHE_SPEC))
        compiled = partial(jax.jit, donate_argnums=1, out_shardings=(whole, cut))
        self._read = compiled(partial(self._read_part, extend, how))
        self._write = compiled(partial(self._write_one, extend, how))

    def start(self, numbers: Sequence[int], seed: int) -> None:
        """Forgets what was read. Texts are told apart by their numbers, when tokens are drawn."""
        self.number = np.resize(np.asarray(numbers, np.int32), self.B)
        self.key = jax.random.key(seed)
        self.cache = decode.empty_cache(self.config, self.mesh, self.B, self.room)
        self.length = np.zeros(self.B, np.int32)  # positions in the cache
        self.last = np.full(self.B, ENDED, np.int32)  # tokens that were drawn and not read yet

    @staticmethod
    def _read_part(extend: Any, how: Drawing, w: Any, cache: Any, *given: jax.Array) -> tuple:
        """The token after each text that ends in these tokens, the given one of the others."""
        tokens_BT, start_B, count_B, key, number_B, drawn_B = given
        at_B1 = jnp.clip(count_B - 1, 0, tokens_BT.shape[1] - 1)[:, None]
        logits_B1V, cache = extend(w, cache, tokens_BT, start_B, at_B1)
        new_B = draw(logits_B1V[:, 0], key, number_B, start_B + count_B, how)
        ends_B = (count_B > 0) & (count_B <= tokens_BT.shape[1])
        return jnp.where(ends_B, new_B, drawn_B), cache

    @staticmethod
    def _write_one(extend: Any, how: Drawing, w: Any, cache: Any, *given: jax.Array) -> tuple:
        token_B, at_B, key, number_B = given
        place_B1 = jnp.zeros_like(at_B)[:, None]
        logits_B1V, cache = extend(w, cache, token_B[:, None], at_B, place_B1)
        return draw(logits_B1V[:, 0], key, number_B, at_B + 1, how), cache

    def read(self, w: Transformer, texts: Sequence[Sequence[int]]) -> jax.Array:
        """Puts tokens behind each text, at least one -> the tokens that are drawn after them."""
        known = [[t] if t != ENDED else [] for t in self.last.tolist()]
        texts = [old + list(new) for old, new in zip(known, texts, strict=False)]
        texts += [[self.end_of_text]] * (self.B - len(texts))
        left_B = np.array([len(text) for text in texts], np.int32)
        T = min(1 << max(3, int(left_B.max() - 1).bit_length()), MOST_AT_ONCE)
        drawn_B = np.zeros(self.B, np.int32)
        for start in range(0, int(left_B.max()), T):
            tokens_BT = np.zeros((self.B, T), np.int32)
            for row, text in enumerate(texts):
                part = text[start : start + T]
                tokens_BT[row, : len(part)] = part
            given = tokens_BT, self.length + start, left_B - start, self.key, self.number, drawn_B
            drawn_B, self.cache = self._read(w, self.cache, *given)
        self.length += left_B
        return drawn_B

    def next(self, w: Transformer, drawn_B: jax.Array, at_B: np.ndarray) -> jax.Array:
        """Puts the drawn tokens at these positions -> those that are drawn after them."""
        drawn_B, self.cache = self._write(w, self.cache, drawn_B, at_B, self.key, self.number)
        return drawn_B

    def write(
        self, w: Transformer, texts: Sequence[Sequence[int]], tokens: int
    ) -> Iterator[np.ndarray]:
        """Reads, then yields the next token [B] of each text, ENDED of one that has ended or has no
        room left, until there are `tokens`, or all have ended.
        """
        drawn = self.read(w, texts)
        ended = np.arange(self.B) >= len(texts)
        for made in range(1, tokens + 1):
            at, ahead = self.length, None
            full = at >= self.room
            if made < tokens and not (ended | full).all():
                # Begun before the last token is looked at, so that the device does not wait.
                ahead = self.next(w, drawn, at)
            self.last = np.asarray(drawn)
            ended |= self.last == self.end_of_text
            yield np.where(ended, ENDED, self.last)
            ended |= full
            if ended.all() or ahead is None:
                return
            drawn, self.length = ahead, np.where(full, at, at + 1)

    @property
    def cache_bytes(self) -> int:
        """On one device."""
        m, rows = self.config.model, self.B // self.config.mesh.fsdp
        values = m.layers * rows * decode.whole_blocks(self.room) * decode.values_per_token(m)
        return values * jnp.dtype(m.compute_dtype).itemsize

    def bytes_per_device(self) -> int:
        """Of weights and cache."""
        shapes = decode.abstract_weights(self.config, model.declare(self.config), self.mesh)
        weights = sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(shapes)
        )
        return weights + self.cache_bytes


# --- while a run trains ---------------------------------------------------------------------------


def writing_mesh(config: Config, mesh: Mesh) -> tuple[Config, Mesh]:
    """Those of the same devices to write on: replicas and ranks of pipeline join those of fsdp."""
    here = decode.config_of(config, math.prod(config.mesh.shape[:-1]), config.mesh.tensor)
    devices = mesh.devices.reshape(here.mesh.shape)
    return here, Mesh(devices, MESH_AXES, axis_types=mesh.axis_types)


class Sampler:
    """Continues the prompts of a run's config, on the devices that it trains on."""

    def __init__(self, config: Config, mesh: Mesh, data: Mixture):
        """Raises  ValueError where the model cannot be laid out so, or has no memory for it."""
        m, s, T = data.manifest, config.sample, config.train.sequence_length
        self.prompts, self.tokens = s.prompts, min(s.tokens, T - 1)
        self.tokenizer = load_tokenizer(m.tokenizer, m.tokenizer_sha256)
        begin = [] if m.begin_of_text is None else [m.begin_of_text]
        ids = [begin + self.tokenizer.encode_ordinary(prompt) for prompt in self.prompts]
        ids = [text[-max(1, T - self.tokens) :] for text in ids]
        self.texts = [text or [m.end_of_text] for text in ids]
        here, place = writing_mesh(config, mesh)
        room = max(map(len, self.texts)) + self.tokens
        drawing = Drawing(s.temperature)
        self.writer = Writer(here, place, len(self.prompts), room, m.end_of_text, drawing)
        needed, stats = self.writer.bytes_per_device(), mesh.local_devices[0].memory_stats() or {}
        free = stats.get("bytes_limit", needed) - stats.get("bytes_in_use", 0)
        if needed > free and stats:
            raise ValueError(f"they need {needed / GIB:.2f} GiB, and {free / GIB:.2f} are free")

    def __call__(self, w: Transformer, step: int) -> list[dict[str, Any]]:
        """For each prompt {"step", "prompt", "text"}."""
        self.writer.start(range(len(self.prompts)), step)
        made = [*self.writer.write(self.writer.ready(w), self.texts, self.tokens)]
        self.writer.cache = None  # its memory is the next step's
        rows = zip(self.prompts, np.array(made).T.tolist(), strict=False)
        return [
            {"step": step, "prompt": prompt, "text": text_of(self.tokenizer, ids)}
            for prompt, ids in rows
        ]


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of generate.py beside those of main.py."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # of a checkpoint that is still kept; the newest good one if not given
    prompt: str | None = None  # text to continue
    prompts: Path | None = None  # file with a text to continue in each line
    interactive: tyro.conf.FlagCreatePairsOff[bool] = False  # ask for text, and go on from there
    tokens: int = 256  # most that are added to each
    temperature: float = 0.8  # 0 takes the likeliest token
    top_k: int = 0  # draw from so many likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that together have this probability
    seed: int = 0  # of what is drawn
    batch: int = 8  # texts that are made at once


def main(arguments: list[str] | None = None) -> None:
    """Print what the model goes on with."""
    flags, rest = tyro.cli(
        Flags, args=arguments, return_unknown_args=True, use_underscores=True, description=__doc__
    )
    check(flags)
    one = [f"--mesh.{axis}=1" for axis in (*MESH_AXES, "virtual")] + ["--train.microbatches=1"]
    run = run_folder.at(flags.run)
    config = resume.config_of(run, [*one, *rest], Flags)
    check_mesh(config)
    config = decode.config_of(config, config.mesh.fsdp, config.mesh.tensor)
    declared, prompts = model.declare(config), prompts_of(flags)
    with multihost.job(replicas=config.mesh.replica):
        _generate(flags, run, config, declared, prompts)


def _generate(
    flags: Flags,
    run: run_folder.Folder,
    config: Config,
    declared: Transformer,
    prompts: list[str],
) -> None:
    config = utils.for_platform(config, jax.default_backend())
    mesh = train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    _, w, told = resume.weights_of(run, flags.step, shapes)
    tokenizer, end_of_text, begin = resume.tokenizer_of(told["tokens"], config)
    texts = [begin + tokenizer.encode_ordinary(prompt) for prompt in prompts]
    check_texts(texts, prompts, config.train.sequence_length)
    room = config.train.sequence_length
    if not flags.interactive:
        room = min(room, max(map(len, texts)) + flags.tokens)
    how = Drawing(flags.temperature, flags.top_k, flags.top_p)
    sequences = min(flags.batch, max(1, len(texts)))
    writer = Writer(config, mesh, sequences, room, end_of_text, how)
    w = writer.ready(w)
    values, size = decode.values_per_token(config.model), writer.cache_bytes / 2**20
    say_aside(
        f"cache: {values} values per token and layer, {size:.2f} MiB per device for {writer.B} "
        f"texts of up to {room} tokens"
    )
    if flags.interactive:
        converse(writer, w, tokenizer, flags)
    else:
        continue_all(writer, w, tokenizer, prompts, texts, flags)


def check(flags: Flags) -> None:
    """Raises ValueError for flags that say nothing to do, or what cannot be."""
    asked = [flags.prompt is not None, flags.prompts is not None, flags.interactive]
    if sum(asked) != 1:
        raise ValueError(
            "nothing to continue, or too much: give one of --prompt TEXT, --prompts FILE and "
            "--interactive."
        )
    for name, least in (("tokens", 1), ("batch", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if getattr(flags, name) < least:
            value = getattr(flags, name)
            raise ValueError(f"--{name} {value} is below {least}. Use {least} or more.")
    if not 0 < flags.top_p <= 1:
        raise ValueError(
            f"--top_p {flags.top_p} is no probability above 0. Use 1 to draw from all."
        )


def check_mesh(config: Config) -> None:
    """Raises ValueError for a mesh that text cannot be made on."""
    if config.mesh.pipeline > 1:
        raise ValueError(
            f"--mesh.pipeline {config.mesh.pipeline}: text is made without a pipeline. Use more "
            "ranks of --mesh.fsdp or --mesh.tensor."
        )


def prompts_of(flags: Flags) -> list[str]:
    """Raises ValueError for a file that cannot be read, or has none."""
    if flags.prompts is None:
        return [] if flags.prompt is None else [flags.prompt]
    try:
        # splitlines would cut at U+2028 too.
        lines = [line for line in flags.prompts.read_text().split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {flags.prompts} cannot be read: {error}.") from None
    if not lines:
        raise ValueError(f"--prompts {flags.prompts} is empty. Write a text in each line.")
    return lines


def check_texts(texts: list[list[int]], prompts: list[str], context: int) -> None:
    """Raises ValueError for a text of no token, or without room for another."""
    for prompt, text in zip(prompts, texts, strict=True):
        if not text:
            raise ValueError("the prompt is empty. Give at least one character, as --prompt def.")
        if len(text) >= context:
            raise ValueError(
                f"the prompt {prompt[:20]!r}... has {len(text)} tokens, and the model was trained "
                f"on {context} (train.sequence_length): none is left to add. Give fewer than "
                f"{context}."
            )


class Printer:
    """Prints a text as its tokens come, and what it took at the end; until the first, programs are
    compiled as well.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.started = tokenizer, time.perf_counter()
        self.first_s, self.at_first, self.tokens = 0.0, 0, 0

    def count(self, new_B: np.ndarray) -> None:
        self.tokens += int((new_B != ENDED).sum())
        if not self.first_s:
            self.first_s, self.at_first = time.perf_counter() - self.started, self.tokens

    def show(self, ids: Sequence[int]) -> None:
        """A character may be cut between tokens: it is printed when it is whole."""
        text = b"".join(token_bytes(self.tokenizer, i) for i in ids)
        self.write(self.decoder.decode(text))

    def begin(self, text: str) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.write(text)

    @staticmethod
    def write(text: str) -> None:
        if is_primary():
            print(text, end="", flush=True)

    def end(self) -> None:
        self.write("\n")

    def told(self) -> str:
        later_s = time.perf_counter() - self.started - self.first_s
        later = self.tokens - self.at_first
        rate = f", then {later / later_s:.1f} tokens/s" if later else ""
        return f"{self.tokens} tokens: the first after {self.first_s:.2f} s{rate}"


def continue_all(
    writer: Writer,
    w: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    texts: list[list[int]],
    flags: Flags,
) -> None:
    """Prints the texts in order, batch by batch, each as it comes."""
    printer = Printer(tokenizer)
    for first in range(0, len(texts), writer.B):
        some = texts[first : first + writer.B]
        writer.start(range(first, first + len(some)), flags.seed)
        made: list[list[int]] = [[] for _ in some]
        row, shown = 0, 0
        printer.begin(prompts[first])
        for new_B in writer.write(w, some, flags.tokens):
            printer.count(new_B[: len(some)])
            for ids, new in zip(made, new_B.tolist(), strict=False):
                ids.append(new)
            printer.show(made[row][shown:])
            shown = len(made[row])
            while made[row][-1] == ENDED and row + 1 < len(some):
                printer.end()
                row, shown = row + 1, len(made[row + 1])
                printer.begin(prompts[first + row])
                printer.show(made[row])
        for later in range(row + 1, len(some)):
            printer.end()
            printer.begin(prompts[first + later])
            printer.show(made[later])
        printer.end()
    say_aside(printer.told())


def say_aside(text: str) -> None:
    if is_primary():
        print(text, file=sys.stderr)


def converse(writer: Writer, w: Transformer, tokenizer: Tokenizer, flags: Flags) -> None:
    """Reads lines and goes on after each, with all that came before in view; ends at the end of
    input, or when the model's context is full.
    """
    writer.start([0], flags.seed)
    say_aside("Write a line; an empty one ends.")
    while (line := sys.stdin.readline()).rstrip("\n"):
        text = tokenizer.encode_ordinary(line)
        left = writer.room - int(writer.length[0]) - len(text) - 1
        if left < 1:
            say_aside(f"the context of {writer.room} tokens is full; start again.")
            return
        printer = Printer(tokenizer)
        printer.begin("")
        for new_B in writer.write(w, [text], min(flags.tokens, left)):
            printer.count(new_B[:1])
            printer.show(new_B[:1].tolist())
        printer.end()
        say_aside(printer.told())


if __name__ == "__main__":
    faults.command_line(main)
