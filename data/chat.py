"""Convert conversations to text with loss weights: answers and their ends are learned, no prompts.

The template `plain` is ordinary text for any tokenizer: its marks are not special tokens. A prompt
for generate.py ends with `<|assistant|>` and a line break:

    <|system|>
    Be brief.<|end|>
    <|user|>
    2 + 2?<|end|>
    <|assistant|>
    4<|end|>

An answer and its end mark, here `4<|end|>`, have weight 1. So has the end of text after a
conversation that ends with an answer. A model thus learns to stop after every turn.

The template `tokenizer` is the chat_template of the tokenizer, which jinja2 renders in a sandbox.
An answer begins where the rendering of the messages before it, plus a generation prompt, ends.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data.hf_tokenizer import Special
from data.readers import Chunk, InputError
from utils import ConfigError

ASSISTANT = "assistant"  # the role whose text is learned
ROLES = ("system", "user", ASSISTANT)
END = "<|end|>"
MARKS = (END, *(f"<|{role}|>" for role in ROLES))
SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT}

PLAIN = "plain"
PLAIN_JINJA = (  # the same for Hugging Face
    "{% for message in messages %}{{ '' if loop.first else '\\n' }}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>' }}{% endfor %}"
    "{{ '\\n<|assistant|>\\n' if add_generation_prompt else '' }}"
)

Message = tuple[str, str]  # role, content
FORMS = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, {"conversations": [{"from": "human", "value": "..."}, ..]}, or "prompt" with '
    '"answer" or "completion"'
)


class Template(NamedTuple):
    text: str  # as the manifest stores it
    to_chunks: Callable[[list[Message]], list[Chunk]]  # raises ConfigError
    marks: tuple[str, ...] = ()  # not allowed in messages


def template_of(name: str, tokenizer: Any) -> Template:
    """Return the template `plain` or the tokenizer's. Raises ConfigError if it has none."""
    if name == PLAIN:
        return Template(PLAIN, plain, MARKS)
    special = getattr(tokenizer, "special", None)  # absent in tiktoken's own encodings
    if not (special and special.chat_template):
        raise ConfigError(
            "--chat-template tokenizer needs a tokenizer with a chat_template, in its "
            "tokenizer_config.json or chat_template.jinja, and this one has none. Use "
            "--chat-template plain."
        )
    return Template(special.chat_template, functools.partial(render, special))


def special_ids(template: Template, special: Special) -> list[int]:
    """Return the special tokens of conversations with and without a system message."""
    turns = [("user", "a"), (ASSISTANT, "b")] * 2
    found = []
    for messages in (turns, [("system", "c"), *turns]):
        with contextlib.suppress(ConfigError):  # a template may refuse a system message
            chunks = template.to_chunks(messages)
            found += [special.ids[chunk.text] for chunk in chunks if chunk.special]
    return found


def to_chunks(row: Any, location: Any, template: Template) -> list[Chunk]:
    """Convert a row. Raises InputError."""
    try:
        return template.to_chunks(conversation(row, template.marks))
    except ValueError as error:
        raise InputError(f"{location}: {error}", "rows that are not conversations") from error


def plain(messages: list[Message]) -> list[Chunk]:
    """Return the conversation's text, divided where the loss weight changes."""
    chunks, prompt = [], ""
    for number, (role, content) in enumerate(messages):
        prompt += "\n" * (number > 0) + f"<|{role}|>\n"
        if role == ASSISTANT:
            chunks += [Chunk(prompt, 0), Chunk(content + END, 1)]
            prompt = ""
        else:
            prompt += content + END
    return [*chunks, Chunk(prompt, 0)] if prompt else chunks


@functools.cache
def compile_template(text: str) -> Any:
    """Compile with jinja2, with the filters and functions that transformers provides."""
    from jinja2 import TemplateError  # late: only these templates need it
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, **options: json.dumps(
        x, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.date(2024, 1, 1).strftime(form)
    # transformers marks learned text with this tag; here prefixes determine what is learned.
    text = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", text)
    return environment.from_string(re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", text))


def render(special: Special, messages: list[Message]) -> list[Chunk]:
    """Return the chunks of a conversation: special tokens of the template, and text.

    Raises  ConfigError if the template refuses, or rewrites messages or earlier turns.
    """
    to_text = functools.partial(render_text, special)
    text = to_text(messages)
    weights = bytearray(len(text))  # of each character
    for number, (role, _) in enumerate(messages):
        if role == ASSISTANT:
            before = to_text(messages[:number], prompt=True)
            upto = to_text(messages[: number + 1])
            if not (text.startswith(upto) and upto.startswith(before)):
                what = "changes earlier turns when others follow"
                if text.startswith(upto) and upto.startswith(to_text(messages[:number])):
                    what = f"ends a prompt with {before[-40:]!r}, and an answer does not begin so"
                raise ConfigError(
                    f"the chat template {what}, so answers cannot be located. Use --chat-template "
                    "plain."
                )
            weights[len(before) : len(upto)] = b"\1" * (len(upto) - len(before))

    def text_chunks(begin: int, end: int) -> Iterator[Chunk]:
        for run in re.finditer(b"\0+|\1+", weights[begin:end]):
            yield Chunk(text[begin + run.start() : begin + run.end()], run[0][0])

    names = sorted(special.ids, key=len, reverse=True)  # the longest match first
    pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
    position, chunks = 0, []
    for begin, end in template_ranges(to_text, messages, text):
        for name in pattern.finditer(text, begin, end):
            chunks += text_chunks(position, name.start())
            chunks.append(Chunk(name[0], weights[name.start()], special=True))
            position = name.end()
    return [*chunks, *text_chunks(position, len(text))]


def render_text(special: Special, messages: list[Message], prompt: bool = False) -> str:
    fields = [{"role": role, "content": content} for role, content in messages]
    try:
        template = compile_template(special.chat_template)
        return template.render(messages=fields, add_generation_prompt=prompt, **special.names)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the chat template refuses the conversation: {error}") from error


def template_ranges(
    to_text: Callable[[list[Message]], str], messages: list[Message], text: str
) -> list[tuple[int, int]]:
    """Return (begin, end) of the text that is the template's own.

    Only there are special tokens recognized; a message stays text even if it looks like one.
    """
    marked = to_text([(role, f"\ue000{number}\ue001") for number, (role, _) in enumerate(messages)])
    parts = re.split("\ue000(\\d+)\ue001", marked)  # template text, number, template text, ..
    for change in (str, str.strip):  # many templates strip messages
        contents = [change(content) for _, content in messages]
        filled = [contents[int(part)] if n % 2 else part for n, part in enumerate(parts)]
        if "".join(filled) == text:
            ends = list(itertools.accumulate(map(len, filled), initial=0))
            return list(itertools.pairwise(ends))[::2]
    raise ConfigError(
        "the chat template does not keep messages as they are, so its special tokens cannot be "
        "distinguished from text that looks like them. Use --chat-template plain."
    )


def conversation(row: Any, marks: tuple[str, ...]) -> list[Message]:
    """Return the messages of a row. Raises ConfigError for malformed ones, or without an answer."""
    messages = [message(fields, marks) for fields in turns(row)]
    if ASSISTANT not in dict(messages):
        roles = ", ".join(role for role, _ in messages) or "none"
        raise ConfigError(
            f"no message has the role {ASSISTANT} (roles: {roles}), so there is nothing to learn. "
            "Remove the line, or add the answer."
        )
    return messages


def turns(row: Any) -> list[Any]:
    """Return the messages of a row in any of the supported forms, without validation."""
    fields = row if isinstance(row, dict) else {}
    for name in ("messages", "conversations"):
        if isinstance(fields.get(name), list):
            return fields[name]
    for name in ("answer", "completion"):
        if "prompt" in fields and name in fields:
            prompt = {"role": "user", "content": fields["prompt"]}
            return [prompt, {"role": ASSISTANT, "content": fields[name]}]
    what = f"the fields {', '.join(fields) or 'none'}" if fields is row else type(row).__name__
    raise ConfigError(f"it is not a conversation: it has {what}; {FORMS}. Correct the line.")


def message(turn: Any, marks: tuple[str, ...]) -> Message:
    fields = turn if isinstance(turn, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if "from" in fields and "value" in fields:  # ShareGPT
        role, content = SHAREGPT_ROLES.get(str(fields["from"]), fields["from"]), fields["value"]
    if not isinstance(role, str) or not isinstance(content, str):
        what = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise ConfigError(
            "a message has no role and content that are text; it has "
            f"{what or type(turn).__name__}: {FORMS}. Correct the line."
        )
    if role not in ROLES:
        raise ConfigError(
            f"a message has the role {role!r}: expected one of {', '.join(ROLES)}. Rename the "
            "role, or remove the line."
        )
    if role == ASSISTANT and not content.strip():
        raise ConfigError(
            "an answer is empty, and a model would learn to give empty answers. Remove the line."
        )
    if mark := next((mark for mark in marks if mark in content), None):
        raise ConfigError(
            f"a message of the role {role} has {mark}, with which the template plain marks turns. "
            "Remove the line, or change the mark."
        )
    return role, content
