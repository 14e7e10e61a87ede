"""A conversation with a model: what of it fits in the context, and the answers.

The cache keeps earlier turns. Each prompt is encoded as a whole, as in training, and only what
follows the tokens that it shares with the cache is appended.
"""

import codecs
import itertools
from collections.abc import Iterator

import numpy as np

from data import chat
from data.chat import ASSISTANT, Message, Template
from data.encode import prompt_ids
from data.tokenizer import TextTokens, check_ids, token_bytes
from inference.sampling import Generator
from model import Transformer
from utils import ConfigError

Rows = Iterator[np.ndarray]  # of Generator.generate


class Conversation:
    """Messages and answers so far, without those that did not fit."""

    def __init__(
        self,
        generator: Generator,
        w: Transformer,
        tokens: TextTokens,
        template: Template,
        system: str,
    ):
        """system  text before the first message; may be empty.

        Raises  ConfigError if the model has no embeddings for the template's special tokens.
        """
        self.generator, self.w, self.tokens, self.template = generator, w, tokens, template
        self.stop = chat.end_of_answer(template.special)[1]
        self.system = [self.checked("system", system)] if system else []
        self.turns: list[list[Message]] = []  # each a message and its answer
        self.cached: list[int] = []  # tokens of the cache
        self.prompt("?", 1)
        self.turns = []

    def checked(self, role: str, text: str) -> Message:
        return chat.message({"role": role, "content": text}, self.template.marks)

    def prompt(self, text: str, tokens: int) -> tuple[list[int], int]:
        """Add a message. Return the prompt for its answer, and how many of the oldest turns were
        dropped so that `tokens` tokens, or half of the context, are left for it.

        Raises  ConfigError for a message that does not fit or that the template refuses.
        """
        context, user = self.generator.max_length, self.checked("user", text)
        for dropped in range(len(self.turns) + 1):
            turns = [*self.turns[dropped:], [user]]
            messages = [*self.system, *itertools.chain(*turns)]
            ids = prompt_ids(self.tokens, self.template.special, messages)
            if len(ids) + min(tokens, context // 2) <= context:
                break
        if len(ids) >= context:
            raise ConfigError(
                f"the message has {len(ids)} tokens with chat template and system text, and the "
                f"model was trained on {context} (train.seq_len). Shorten it."
            )
        check_ids([ids], self.generator.vocab_size)
        self.turns = turns
        return ids, dropped

    def generate(self, prompt: list[int], tokens: int) -> Rows:
        """Return the rows of Generator.generate that answer a prompt."""
        pairs = zip(self.cached, prompt[:-1], strict=False)  # at least one token is appended
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.generator.rewind(same)
        self.cached = prompt
        return self.generator.generate(self.w, [prompt[same:]], tokens)

    def text_of(self, rows: Rows) -> Iterator[str]:
        """Yield the text of an answer in parts, up to the text that ends one, and remember it.

        What may be the begin of that text is yielded once it is not.
        """
        decoder, new, text, shown = codecs.getincrementaldecoder("utf-8")("replace"), [], "", 0
        for row_B in rows:
            new.append(int(row_B[0]))
            text += decoder.decode(token_bytes(self.tokens.tokenizer, new[-1]))
            text, end, _ = text.partition(self.stop) if self.stop else (text, "", "")
            sizes = range(0 if end else len(self.stop), -1, -1)
            safe = len(text) - next(n for n in sizes if text.endswith(self.stop[:n]))
            yield text[shown:safe]
            shown = safe
            if end:
                break
        yield text[shown:]
        self.cached = self.cached + new[:-1]
        self.turns[-1].append((ASSISTANT, text))
