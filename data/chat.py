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

The template `tokenizer` is the chat_template of the tokenizer. jinja2 renders both in a sandbox. An
answer begins where the rendering of the messages before it, plus a generation prompt, ends.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from typing import Any, NamedTuple

from data.hf_tokenizer import Special
from data.readers import Chunk, InputError
from data.tokenizer import NO_SPECIAL, Tokenizer, special_of
from utils import ConfigError

ASSISTANT = "assistant"  # the role whose text is learned
ROLES = ("system", "user", ASSISTANT)
MARKS = ("<|end|>", *(f"<|{role}|>" for role in ROLES))
SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT}

PLAIN = "plain"
PLAIN_JINJA = (
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
    special: Special  # the template for jinja2, and the special tokens that it may write
    marks: tuple[str, ...] = ()  # not allowed in messages


def template_of(name: str, tokenizer: Tokenizer) -> Template:
    """Return the template `plain` or the tokenizer's. Raises ConfigError if it has none."""
    if name == PLAIN:
        return Template(PLAIN, NO_SPECIAL._replace(chat_template=PLAIN_JINJA), MARKS)
    special = special_of(tokenizer)
    if not special.chat_template:
        raise ConfigError(
            "--chat-template tokenizer needs a tokenizer with a chat_template, in its "
            "tokenizer_config.json or chat_template.jinja, and this one has none. Use "
            "--chat-template plain."
        )
    return Template(special.chat_template, special)


def template_of_run(stored: str | None, tokenizer: Tokenizer) -> Template:
    """Return the template in the manifest of a run, or else its tokenizer's, or else `plain`."""
    text = stored or special_of(tokenizer).chat_template or PLAIN
    own = Template(text, special_of(tokenizer)._replace(chat_template=text))
    return template_of(PLAIN, tokenizer) if text == PLAIN else own


def to_chunks(row: Any, template: Template) -> list[Chunk]:
    """Convert a row. Raises InputError."""
    try:
        return render(template.special, conversation(row, template.marks))
    except ValueError as error:
        raise InputError(f": {error}", "rows that are not conversations") from error


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


def render(special: Special, messages: list[Message], prompt: bool = False) -> list[Chunk]:
    """Return the chunks of a conversation: special tokens of the template, and text.

    prompt  end with what precedes an answer; the template may rewrite earlier answers

    Placeholders stand for the messages until special tokens are recognized, so a message stays text
    even if it looks like one.

    Raises  ConfigError if the template refuses, or rewrites messages or earlier turns.
    """
    holders = [(role, f"\ue000{number}\ue001") for number, (role, _) in enumerate(messages)]
    marked, edges = render_text(special, holders, prompt), [0]
    for number, (role, _) in enumerate(messages):
        if role == ASSISTANT:
            with contextlib.suppress(*[ConfigError] * prompt):
                edges += answer_range(special, holders[: number + 1], marked)
    names = sorted(special.ids, key=len, reverse=True)  # the longest match first
    alternatives = ["\ue000\\d+\ue001", *map(re.escape, names)]
    pattern = re.compile(f"({'|'.join(alternatives)})")
    ranges = itertools.pairwise([*edges, len(marked)])
    parts = [
        (part, number % 2)  # every second range is an answer
        for number, (begin, end) in enumerate(ranges)
        for part in pattern.split(marked[begin:end])
    ]
    text = render_text(special, messages, prompt)
    for change in (str, str.strip):  # many templates strip messages
        contents = {holders[n][1]: change(content) for n, (_, content) in enumerate(messages)}
        chunks = [Chunk(contents.get(p, p), weight, p in special.ids) for p, weight in parts]
        if "".join(chunk.text for chunk in chunks) == text:
            return chunks
    given = [content for role, content in messages if role != ASSISTANT]
    if prompt and not any(name in content for name in names for content in given):
        # All special tokens are the template's or generated ones.
        return [Chunk(part, 0, part in special.ids) for part in pattern.split(text)]
    fix = "Write no names of special tokens" if prompt else "Use --chat-template plain"
    raise ConfigError(
        "the chat template does not keep messages as they are, so its special tokens cannot be "
        f"distinguished from text that looks like them. {fix}."
    )


def end_of_answer(special: Special) -> tuple[list[int], str]:
    """Return (the special token that the template writes after an answer, text if it has none)."""
    after = render_text(special, [("user", "?"), (ASSISTANT, "\ue000")]).rpartition("\ue000")[2]
    found = [
        (after.index(name), -len(name), id) for name, id in special.ids.items() if name in after
    ]
    return ([min(found)[2]], "") if found else ([], after.strip())


def answer_range(special: Special, messages: list[Message], text: str) -> tuple[int, int]:
    """Return (begin, end) of the last message, an answer, in the text of a conversation.

    Raises  ConfigError if later messages change the text of these, or the answer that of a prompt.
    """
    before = render_text(special, messages[:-1], prompt=True)
    upto = render_text(special, messages)
    if text.startswith(upto) and upto.startswith(before):
        return len(before), len(upto)
    raise ConfigError(
        "the chat template changes earlier turns when others follow, or ends a prompt with text "
        "that an answer does not begin with, so answers cannot be located. Use --chat-template "
        "plain."
    )


def render_text(special: Special, messages: list[Message], prompt: bool = False) -> str:
    fields = [{"role": role, "content": content} for role, content in messages]
    try:
        template = compile_template(special.chat_template)
        return template.render(messages=fields, add_generation_prompt=prompt, **special.names)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the chat template refuses the conversation: {error}") from error


def conversation(row: Any, marks: tuple[str, ...]) -> list[Message]:
    """Return the messages of a row. Raises ConfigError for malformed ones, or without an answer."""
    messages = [message(turn, marks) for turn in turns(row)]
    if ASSISTANT not in dict(messages):
        roles = ", ".join(role for role, _ in messages) or "none"
        raise ConfigError(
            f"no message has the role {ASSISTANT} (roles: {roles}), so there is nothing to learn. "
            "Remove the line, or add the answer."
        )
    return messages


def turns(row: Any) -> list[Any]:
    """Return the messages of a row in any of the supported forms, without validation."""
    match row:
        case {"messages": [*messages]} | {"conversations": [*messages]}:
            return messages
        case {"prompt": prompt, "answer": answer} | {"prompt": prompt, "completion": answer}:
            return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": answer}]
        case dict():
            what = f"the fields {', '.join(row) or 'none'}"
        case _:
            what = type(row).__name__
    raise ConfigError(f"it is not a conversation: it has {what}; {FORMS}. Correct the line.")


def message(turn: Any, marks: tuple[str, ...]) -> Message:
    match turn:
        case {"from": str(role), "value": str(content)}:  # ShareGPT
            role = SHAREGPT_ROLES.get(role, role)
        case {"role": str(role), "content": str(content)}:
            pass
        case _:
            fields = turn.items() if isinstance(turn, dict) else ()
            what = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields)
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
        raise ConfigError("an answer is empty, so there is nothing to learn. Remove the line.")
    if mark := next((mark for mark in marks if mark in content), None):
        raise ConfigError(
            f"a message of the role {role} has {mark}, with which the template plain marks turns. "
            "Remove the line, or change the mark."
        )
    return role, content
