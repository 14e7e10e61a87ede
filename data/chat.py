"""Conversations as text, and what of it is learned: answers with their ends, and no prompt.

The template `plain` is text and nothing else, so that any tokenizer takes it; its marks are no
special tokens. A prompt for generate.py ends with `<|assistant|>` and a line break:

    <|system|>
    Be brief.<|end|>
    <|user|>
    2 + 2?<|end|>
    <|assistant|>
    4<|end|>

An answer and the mark that ends it, here `4<|end|>`, have weight 1, and so has the end-of-text
after a conversation that ends with an answer. So a model learns to stop in every turn.

The template `tokenizer` is the chat_template of the tokenizer, which jinja2 renders in a sandbox.
An answer begins where rendering the messages before it, with the start of an answer, ends.
"""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data.hf_tokenizer import Special
from data.readers import Bad, Piece

ANSWERS = "assistant"  # the role whose text is learned
ROLES = ("system", "user", ANSWERS)
END = "<|end|>"
MARKS = (END, *(f"<|{role}|>" for role in ROLES))
SHAREGPT_ROLES = {"human": "user", "gpt": ANSWERS, "chatgpt": ANSWERS, "bing": ANSWERS}

Message = tuple[str, str]  # role, content
FORMS = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, {"conversations": [{"from": "human", "value": "..."}, ..]}, or "prompt" with '
    '"answer" or "completion"'
)


class Template(NamedTuple):
    """How a conversation becomes text."""

    text: str  # as the manifest has it
    pieces: Callable[[list[Message]], list[Piece]]  # raises ValueError
    marks: tuple[str, ...] = ()  # that no message may have


def template_of(name: str, tokenizer: Any) -> Template:
    """The template `plain`, or that of the tokenizer. Raises ValueError where it has none."""
    if name == "plain":
        return Template("plain", plain, MARKS)
    special = getattr(tokenizer, "special", None)  # tiktoken's own have none
    if not (special and special.chat_template):
        raise ValueError(
            "--chat-template tokenizer needs a tokenizer with a chat_template, in its "
            "tokenizer_config.json or chat_template.jinja, and this one has none. Use "
            "--chat-template plain."
        )
    return Template(special.chat_template, functools.partial(rendered, special))


def to_pieces(row: Any, where: Any, template: Template) -> list[Piece]:
    """Of a row. Raises Bad."""
    try:
        return template.pieces(conversation(row, template.marks))
    except ValueError as error:
        raise Bad(f"{where}: {error}", "rows that are no conversation") from error


def plain(messages: list[Message]) -> list[Piece]:
    """The conversation's text, cut where the loss weight changes."""
    cut, given = [], ""
    for number, (role, content) in enumerate(messages):
        given += "\n" * (number > 0) + f"<|{role}|>\n"
        if role == ANSWERS:
            cut += [Piece(given, 0), Piece(content + END, 1)]
            given = ""
        else:
            given += content + END
    return [*cut, Piece(given, 0)] if given else cut


@functools.cache
def compiled(text: str) -> Any:
    """Of jinja2, with what transformers gives to templates."""
    from jinja2 import TemplateError  # late: only these templates need it
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(
        x, ensure_ascii=ensure_ascii, **how
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.date(2024, 1, 1).strftime(form)
    # A tag of transformers, which marks what is learned: that is found by prefixes here.
    text = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", text)
    return environment.from_string(re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", text))


def rendered(special: Special, messages: list[Message]) -> list[Piece]:
    """The pieces of a conversation: special tokens of the template by name, all else as text.

    Raises  ValueError where the template refuses, or rewrites messages or earlier turns.
    """
    render = functools.partial(render_with, special)
    whole = render(messages)
    learned = bytearray(len(whole))  # of each character, the weight
    for number, (role, _) in enumerate(messages):
        if role == ANSWERS:
            before = render(messages[:number], prompt=True)
            upto = render(messages[: number + 1])
            if not (whole.startswith(upto) and upto.startswith(before)):
                raise ValueError(
                    "the chat template changes earlier turns when others follow, so it does not "
                    "say what an answer is. Use --chat-template plain."
                )
            learned[len(before) : len(upto)] = b"\1" * (len(upto) - len(before))
    # Special tokens are cut out, the longest first; what is between them is one text.
    names = sorted(special.ids, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
    at, pieces = 0, []
    for begin, end in own_parts(render, messages, whole):
        for name in pattern.finditer(whole, begin, end):
            pieces += texts(whole, learned, at, name.start())
            pieces.append(Piece(name[0], learned[name.start()], special=True))
            at = name.end()
    return [*pieces, *texts(whole, learned, at, len(whole))]


def render_with(special: Special, messages: list[Message], prompt: bool = False) -> str:
    given = [{"role": role, "content": content} for role, content in messages]
    try:
        template = compiled(special.chat_template)
        return template.render(messages=given, add_generation_prompt=prompt, **special.names)
    except Exception as error:  # of whatever a template does
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def texts(whole: str, learned: bytearray, begin: int, end: int) -> Iterator[Piece]:
    """Cut where the weight changes."""
    for run in re.finditer(b"\0+|\1+", learned[begin:end]):
        yield Piece(whole[begin + run.start() : begin + run.end()], run[0][0])


def own_parts(
    render: Callable[[list[Message]], str], messages: list[Message], whole: str
) -> list[tuple[int, int]]:
    """(begin, end) of what is the template's own in the conversation: what is a message's stays
    text whatever it looks like.
    """
    marked = render([(role, f"\ue000{number}\ue001") for number, (role, _) in enumerate(messages)])
    found = re.split("\ue000(\\d+)\ue001", marked)  # own text, number, own text, ..
    for change in (str, str.strip):  # many templates strip messages
        contents = [change(content) for _, content in messages]
        cut = [contents[int(t)] if n % 2 else t for n, t in enumerate(found)]
        if "".join(cut) == whole:
            ends = list(itertools.accumulate(map(len, cut), initial=0))
            return list(itertools.pairwise(ends))[::2]
    raise ValueError(
        "the chat template does not keep messages as they are, so special tokens of its own cannot "
        "be told from text that looks like them. Use --chat-template plain."
    )


def conversation(row: Any, marks: tuple[str, ...]) -> list[Message]:
    """The messages of a row. Raises ValueError where there is nothing to learn or something else
    than messages.
    """
    found = [message(one, marks) for one in turns(row)]
    if ANSWERS not in dict(found):
        roles = ", ".join(role for role, _ in found) or "none"
        raise ValueError(
            f"no message has the role {ANSWERS} (roles: {roles}), so there is nothing to learn. "
            "Take the line out, or add the answer."
        )
    return found


def turns(row: Any) -> list[Any]:
    """The messages as the row has them, in any form."""
    fields = row if isinstance(row, dict) else {}
    for name in ("messages", "conversations"):
        if isinstance(fields.get(name), list):
            return fields[name]
    for name in ("answer", "completion"):
        if "prompt" in fields and name in fields:
            asked = {"role": "user", "content": fields["prompt"]}
            return [asked, {"role": ANSWERS, "content": fields[name]}]
    what = f"the fields {', '.join(fields) or 'none'}" if fields is row else type(row).__name__
    raise ValueError(f"it is no conversation: it has {what}; {FORMS}. Correct the line.")


def message(one: Any, marks: tuple[str, ...]) -> Message:
    """(role, content) of one message."""
    fields = one if isinstance(one, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if "from" in fields and "value" in fields:  # ShareGPT
        role, content = SHAREGPT_ROLES.get(str(fields["from"]), fields["from"]), fields["value"]
    if not isinstance(role, str) or not isinstance(content, str):
        what = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise ValueError(
            "a message has no role and content that are text; it has "
            f"{what or type(one).__name__}: {FORMS}. Correct the line."
        )
    if role not in ROLES:
        raise ValueError(
            f"a message has the role {role!r}: expected one of {', '.join(ROLES)}. Rename the "
            "role, or take the line out."
        )
    if role == ANSWERS and not content.strip():
        raise ValueError(
            "an answer is empty, and a model would learn to say nothing. Take the line out."
        )
    if mark := next((mark for mark in marks if mark in content), None):
        raise ValueError(
            f"a message of the role {role} has {mark}, with which the template plain marks turns. "
            "Take the line out, or write the mark in another way."
        )
    return role, content
