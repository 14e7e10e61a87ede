"""Generate text from a checkpoint.

    ./run.sh python generate.py --run runs/tiny --prompt "def "
    ./run.sh python generate.py --run runs/tiny --prompts prompts.txt --temperature 0
    ./run.sh python generate.py --run runs/tiny --interactive
    ./run.sh python generate.py --run runs/chat --chat --system "Be brief."

Prints text as tokens arrive; standard error reports devices, tokens per second and the time to the
first token. --interactive continues lines of text. --chat answers messages by the chat template
that the run was tuned with, or else its tokenizer's, or else `plain` (data/chat.py). Flags of
main.py override the run's config. The command uses one device unless they give a mesh, for example
--mesh.fsdp 4 --mesh.tensor 2.
"""

import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from data.tokenizer import (
    TextTokens,
    Tokenizer,
    encode_continuation,
    encode_special,
    text_tokens,
    token_bytes,
)
from inference.conversation import Conversation
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
    chat: bool = False  # read messages and answer them by the run's chat template
    system: str = ""  # text before a chat that says how to answer
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
    check(flags)
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
        devices = f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}"
        write(f"{devices}, {config.model.compute_dtype}\n", sys.stderr)
        encode = encode_special if flags.special else type(tokenizer).encode_ordinary
        texts = [begin + encode(tokenizer, prompt) for prompt in prompts]
        if flags.chat:
            template = chat.template_of_run(stored["tokens"].get("chat_template"), tokenizer)
            ends = [*ends, *chat.end_of_answer(template.special)[0]]
        check_texts(texts, prompts, config.train.seq_len)
        needed = max(map(len, texts), default=config.train.seq_len) + flags.tokens
        length, batch = min(config.train.seq_len, needed), min(flags.batch, len(texts) or 1)
        options = SamplingOptions(flags.temperature, flags.top_k, flags.top_p)
        generator = Generator(*generation_mesh(config, mesh), batch, length, ends, options)
        w = generator.convert_weights(w)
        if flags.chat:
            generator.reset([0], flags.seed)
            if template.text == chat.PLAIN and "chat_template" not in stored["tokens"]:
                text = f"{flags.run} was not tuned on conversations, and its tokenizer has no chat "
                write(f"{text}template: plain is used (data/chat.py).\n", sys.stderr)
            tokens = TextTokens(tokenizer, begin, ends)
            talk(Conversation(generator, w, tokens, template, flags.system), flags)
        elif flags.interactive:
            converse(generator, w, tokenizer, begin, flags)
        else:
            complete(generator, w, tokenizer, prompts, texts, flags)


def read_prompts(flags: Flags) -> list[str]:
    """Return the texts to continue. Raises ConfigError for an empty or unreadable file."""
    if flags.prompts is None:
        return [] if flags.prompt is None else [flags.prompt]
    try:
        # splitlines would split at U+2028 too.
        lines = [line for line in flags.prompts.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {flags.prompts} cannot be read: {error}.") from None
    if not lines:
        raise ConfigError(f"--prompts {flags.prompts} is empty. Write a text in each line.")
    return lines


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


def check(flags: Flags) -> None:
    """Raise ConfigError for flags that do not go together."""
    if (
        sum((flags.prompt is not None, flags.prompts is not None, flags.interactive, flags.chat))
        != 1
    ):
        raise ConfigError(
            "give exactly one of --prompt TEXT, --prompts FILE, --interactive and --chat."
        )
    if flags.system and not flags.chat:
        raise ConfigError("--system begins a chat. Add --chat, or omit --system.")
    if flags.special and (flags.chat or flags.interactive):
        raise ConfigError(
            "--special is for --prompt and --prompts. Omit it; a chat template has its own."
        )


class Printer:
    """Prints texts as their tokens arrive; times them, with compilation before the first token."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.started = tokenizer, time.perf_counter()
        self.first_s, self.first_tokens, self.tokens = 0.0, 0, 0

    def stream(self, generated: Iterator[np.ndarray], prompts: Sequence[str]) -> None:
        """Print the first text of a batch as its tokens arrive, and then the others."""
        completions: list[list[int]] = [[] for _ in prompts]
        self.begin(prompts[0])
        for new_B in self.timed(generated, len(prompts)):
            for ids, new in zip(completions, new_B.tolist(), strict=False):
                ids.append(new)
            self.show(completions[0][-1:])
        for prompt, ids in zip(prompts[1:], completions[1:], strict=True):
            self.begin(f"\n{prompt}")
            self.show(ids)
        write("\n")

    def timed(self, generated: Iterator[np.ndarray], texts: int) -> Iterator[np.ndarray]:
        """Yield the tokens of a batch, and count those of the first texts."""
        for new_B in generated:
            self.tokens += int((new_B[:texts] != ENDED).sum())
            if not self.first_s:
                self.first_s, self.first_tokens = time.perf_counter() - self.started, self.tokens
            yield new_B

    def begin(self, text: str) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        write(text)

    def show(self, ids: Sequence[int]) -> None:
        """Print tokens. A character split between tokens is printed once it is complete."""
        write(self.decoder.decode(b"".join(token_bytes(self.tokenizer, i) for i in ids)))

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


def talk(conversation: Conversation, flags: Flags) -> None:
    """Answer each input line until an empty one, or the end of the input."""
    write("Write a message; an empty line or Ctrl-D ends.\n", sys.stderr)
    while line := sys.stdin.readline().rstrip("\n"):
        try:
            prompt, dropped = conversation.prompt(line, flags.tokens)
        except ConfigError as error:
            write(f"{error}\n", sys.stderr)
            continue
        if dropped:
            text = f"the context is full: {dropped} of the oldest turns no longer count.\n"
            write(text, sys.stderr)
        printer = Printer(conversation.tokens.tokenizer)
        rows = printer.timed(conversation.generate(prompt, flags.tokens), 1)
        for part in conversation.text_of(rows):
            write(part)
        write("\n")
        write(printer.summary(), sys.stderr)


if __name__ == "__main__":
    errors.run_command(main)
