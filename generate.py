"""Generate text from a checkpoint.

    ./run.sh python generate.py --run runs/tiny --prompt "def "
    ./run.sh python generate.py --run runs/tiny --prompts prompts.txt --temperature 0
    ./run.sh python generate.py --run runs/tiny --interactive
    ./run.sh python generate.py --run runs/laptop-chat --chat --system "Be brief."

Prints text as tokens arrive; standard error reports the device, tokens per second and the time to
the first token. Flags of main.py override the run's config. The command uses one device unless they
give a mesh, for example --mesh.fsdp 4 --mesh.tensor 2.
"""

import codecs
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

import checkpoint
import hardware
import model
import train
import utils
from data import chat
from data.encode import Encoder
from data.readers import Document
from data.settings import Prepare
from data.tokenizer import Tokenizer, encode_continuation, encode_special, text_tokens, token_bytes
from inference.sampling import ENDED, Generator, SamplingOptions, generation_mesh
from model import Transformer
from runtime import cli, distributed, errors, resume, run_directory
from runtime.console import is_primary
from utils import MESH_AXES, ConfigError, setting


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of generate.py; those of main.py are accepted too."""

    run: str  # directory of the run, for example runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # step of a kept checkpoint; default: the newest valid one
    prompt: str | None = None  # text to continue
    prompts: Path | None = None  # file with a text to continue in each line
    interactive: bool = False  # read lines and continue the dialogue
    chat: bool = False  # answer lines by the chat template of the run, or else of its tokenizer
    system: str = ""  # with --chat: text before the first message
    special: bool = False  # names of special tokens in prompts are these tokens, not text
    tokens: int = 256  # maximum number of new tokens per text
    temperature: float = 0.8  # 0 takes the most likely token
    top_k: int = 0  # sample from this many most likely tokens; 0: from all
    # sample from the most likely tokens that together have this probability
    top_p: float = setting(1.0, above=0, at_most=1)
    seed: int = 0  # of the sampling
    batch: int = 8  # texts generated at once


def main(arguments: list[str] | None = None) -> None:
    """Print the completions of the prompts."""
    flags, rest = cli.parse_known(Flags, arguments, __doc__)
    modes = flags.prompt is not None, flags.prompts is not None, flags.interactive, flags.chat
    if sum(modes) != 1:
        of = "--prompt TEXT, --prompts FILE, --interactive and --chat"
        raise ConfigError(f"give exactly one of {of}.")
    if (flags.system and not flags.chat) or (flags.special and not any(modes[:2])):
        raise ConfigError("--system needs --chat, and --special a prompt. Add it.")
    one = [f"--mesh.{axis}=1" for axis in (*MESH_AXES, "virtual")] + ["--train.microbatches=1"]
    run = run_directory.at(flags.run)
    config = resume.config_of(run, [*one, *rest], Flags)
    declared, prompts = model.declare(config), read_prompts(flags)
    with distributed.job(replicas=config.mesh.replica):
        config = utils.for_platform(config, hardware.platform_of_device(jax.devices()[0]))
        mesh = train.make_mesh(config)
        shapes = train.abstract_state(config, declared, mesh).weights
        _, w, stored = checkpoint.load_weights(run, flags.step, shapes)
        tokenizer, begin, ends = text_tokens(stored["tokens"], run)
        device = f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}"
        write(f"{device}, {config.model.compute_dtype}\n", sys.stderr)
        encode = encode_special if flags.special else type(tokenizer).encode_ordinary
        texts = [begin + encode(tokenizer, prompt) for prompt in prompts]
        template = chat.template_of_run(stored["tokens"].get("chat_template"), tokenizer)
        if flags.chat:
            ends += chat.end_of_answer(template.special)[0]
        check_texts(texts, prompts, config.train.seq_len)
        needed = max(map(len, texts), default=config.train.seq_len) + flags.tokens
        length, batch = min(config.train.seq_len, needed), min(flags.batch, len(texts) or 1)
        options = SamplingOptions(flags.temperature, flags.top_k, flags.top_p)
        generator = Generator(*generation_mesh(config, mesh), batch, length, ends, options)
        w = generator.convert_weights(w)
        if flags.chat:
            if template.text == chat.PLAIN and "chat_template" not in stored["tokens"]:
                text = "neither the run nor its tokenizer has a chat template: using `plain`"
                write(f"{text} (data/chat.py)\n", sys.stderr)
            name = run.tokenizer(stored["tokens"]["tokenizer"])
            encoder = Encoder(Prepare(source="", out="", tokenizer=name, add_bos=bool(begin)))
            generator.reset([0], flags.seed)
            text = {"role": "system", "content": flags.system}
            system = [chat.message(text, template.marks)] if flags.system else []
            talk(Conversation(generator, w, encoder, template, flags.tokens, system))
        elif flags.interactive:
            converse(generator, w, tokenizer, begin, flags)
        else:
            complete(generator, w, tokenizer, prompts, texts, flags)


def read_prompts(flags: Flags) -> list[str]:
    """Return the texts to continue. Raises ConfigError for an empty or unreadable file."""
    if flags.prompts is None:
        return [] if flags.prompt is None else [flags.prompt]
    return [line for line in cli.read_lines("prompts", flags.prompts, "text") if line]


def check_texts(texts: list[list[int]], prompts: list[str], context: int) -> None:
    """Raises ConfigError for an empty text, or one that fills the context."""
    for prompt, text in zip(prompts, texts, strict=True):
        if not text:
            raise ConfigError("the prompt is empty. Give at least one character, as --prompt def.")
        if len(text) >= context:
            raise ConfigError(
                f"the prompt {prompt[:20]!r}... has {len(text)} tokens, and the model was trained "
                f"on {context} (train.seq_len). Give a prompt of fewer than {context} tokens."
            )


class Printer:
    """Prints texts as their tokens arrive; times them, with compilation before the first token."""

    def __init__(self, tokenizer: Tokenizer, stop: str = ""):
        """stop  text that ends the first text of a batch; may be empty."""
        self.tokenizer, self.stop, self.started = tokenizer, stop, time.perf_counter()
        self.first_s, self.first_tokens, self.tokens = 0.0, 0, 0

    def stream(self, generated: Iterator[np.ndarray], prompts: Sequence[str]) -> list[int]:
        """Print the first text of a batch as its tokens arrive, and then the others.

        Returns the tokens of the first text.
        """
        completions: list[list[int]] = [[] for _ in prompts]
        self.begin(prompts[0])
        for new_B in generated:
            self.tokens += int((new_B[: len(prompts)] != ENDED).sum())
            if not self.first_s:
                self.first_s, self.first_tokens = time.perf_counter() - self.started, self.tokens
            for ids, new in zip(completions, new_B.tolist(), strict=False):
                ids.append(new)
            if self.show(completions[0][-1:]):
                break
        write(self.text[self.shown :])
        for prompt, ids in zip(prompts[1:], completions[1:], strict=True):
            self.begin(f"\n{prompt}")
            self.show(ids)
        write("\n")
        return completions[0]

    def begin(self, text: str) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.shown = "", 0
        write(text)

    def show(self, ids: Sequence[int]) -> bool:
        """Print tokens up to `stop`, and return whether it was there.

        A character of several tokens is printed once it is complete, and text with which `stop` may
        begin once it does not.
        """
        self.text += self.decoder.decode(b"".join(token_bytes(self.tokenizer, i) for i in ids))
        if ended := bool(self.stop) and self.stop in self.text:
            self.text = self.text[: self.text.index(self.stop)]
        starts = (self.stop[:size] for size in range(0 if ended else len(self.stop), -1, -1))
        ready = len(self.text) - len(next(filter(self.text.endswith, starts)))
        write(self.text[self.shown : ready])
        self.shown = ready
        return ended

    def summary(self) -> str:
        later_s = time.perf_counter() - self.started - self.first_s
        later = self.tokens - self.first_tokens
        rate = f", then {later / later_s:.1f} tokens/s" if later else ""
        return f"{self.tokens} tokens: the first after {self.first_s:.2f} s{rate}\n"


def write(text: str, file: TextIO | None = None) -> None:
    """Print text without a line feed, on stdout by default."""
    if is_primary():
        print(text, end="", file=file, flush=True)


def complete(
    generator: Generator,
    w: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    texts: list[list[int]],
    flags: Flags,
) -> None:
    """Print the texts and their completions, batch by batch."""
    printer = Printer(tokenizer)
    for first in range(0, len(texts), generator.B):
        batch = slice(first, first + generator.B)
        generator.reset(range(len(texts))[batch], flags.seed)
        printer.stream(generator.generate(w, texts[batch], flags.tokens), prompts[batch])
    write(printer.summary(), sys.stderr)


def converse(
    generator: Generator, w: Transformer, tokenizer: Tokenizer, begin: list[int], flags: Flags
) -> None:
    """Continue each input line, with all earlier text as context.

    begin  tokens before the first line.

    Ends at an empty line, at the end of the input, or when the context is full.
    """
    generator.reset([0], flags.seed)
    write("Write a line; an empty one ends.\n", sys.stderr)
    while (line := sys.stdin.readline()).rstrip("\n"):
        if int(generator.length[0]):
            text = encode_continuation(tokenizer, line)
        else:
            text = begin + tokenizer.encode_ordinary(line)
        left = generator.max_length - int(generator.length[0]) - len(text) - 1
        if left < 1:
            text = f"the context of {generator.max_length} tokens is full; start again.\n"
            write(text, sys.stderr)
            return
        printer = Printer(tokenizer)
        printer.stream(generator.generate(w, [text], min(flags.tokens, left)), [""])
        write(printer.summary(), sys.stderr)


@dataclass
class Conversation:
    """A chat: those turns that fit in the context, and the tokens in the cache."""

    generator: Generator
    w: Transformer
    encoder: Encoder
    template: chat.Template
    tokens: int  # most of an answer
    system: list[chat.Message]  # empty or one
    turns: list[list[chat.Message]] = field(default_factory=list)  # of a message and its answer
    cached: list[int] = field(default_factory=list)

    def prompt(self, text: str) -> tuple[list[int], list[list[chat.Message]]]:
        """Return the tokens that an answer to a text continues, and the turns in them.

        The oldest turns are left out where space for an answer, or half of the context, is missing.
        Raises ConfigError for a text that does not fit alone, or that the template refuses.
        """
        context, marks = self.generator.max_length, self.template.marks
        turns = [*self.turns, [chat.message({"role": "user", "content": text}, marks)]]
        for first in range(len(turns)):
            messages = [*self.system, *itertools.chain(*turns[first:])]
            chunks = chat.render(self.template.special, messages, prompt=True)
            parts = self.encoder.encode(Document("", 0, chunks, ends=False))
            ids = [int(token) for part, *_ in parts for token in part]
            if len(ids) + min(self.tokens, context // 2) <= context:
                break
        if len(ids) >= context:
            raise ConfigError(
                f"the message has {len(ids)} tokens with the template and the system text, and the "
                f"model was trained on {context} (train.seq_len). Write a shorter one."
            )
        return ids, turns[first:]

    def answer(self, text: str) -> None:
        """Print the answer to a text. What the cache has of the prompt is not computed again."""
        ids, turns = self.prompt(text)
        if dropped := len(self.turns) + 1 - len(turns):
            write(f"the context is full: dropped {dropped} of the oldest turns\n", sys.stderr)
        pairs = zip(self.cached, ids[:-1], strict=False)  # at least one token is appended
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        same = self.generator.rewind(same)
        stop = chat.end_of_answer(self.template.special)[1]
        printer = Printer(self.encoder.tokenizer, stop)
        new = printer.stream(self.generator.generate(self.w, [ids[same:]], self.tokens), [""])
        write(printer.summary(), sys.stderr)
        self.cached = ids + new[:-1]  # the last one is not in the cache
        self.turns = [*turns[:-1], [*turns[-1], (chat.ASSISTANT, printer.text)]]


def talk(conversation: Conversation) -> None:
    """Answer input lines until an empty one, or the end of the input."""
    conversation.prompt("?")  # raises if the system text does not fit
    write("Write a message; an empty line or Ctrl-D ends.\n", sys.stderr)
    while line := sys.stdin.readline().rstrip("\n"):
        try:
            conversation.answer(line)
        except ConfigError as error:
            write(f"{error}\n", sys.stderr)


if __name__ == "__main__":
    errors.run_command(main)
