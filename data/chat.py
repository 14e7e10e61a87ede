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
after a conversation that ends with an answer. Nothing else is ever learned to follow the mark, so
that a model stops there in every turn.

The template `tokenizer` is the chat_template of the tokenizer, which jinja2 renders in a sandbox as
transformers does. An answer is what follows where rendering the messages before it, and the start
of an answer, ends.
"""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    """The template `plain`, or that of the tokenizer.

    Raises  ValueError where it has none.
    """
    if name == "plain":
        return Template("plain", plain, MARKS)
    text = getattr(tokenizer, "chat_template", None)
    if not text:
        raise ValueError(
            "--chat-template tokenizer needs a tokenizer with a chat_template, in its "
            "tokenizer_config.json or chat_template.jinja, and this one has none. Use "
            "--chat-template plain."
        )
    names = tokenizer.special_names
    return Template(text, functools.partial(rendered, compiled(text), names, tokenizer.special_ids))


def to_pieces(row: Any, where: Any, template: Template) -> list[Piece]:
    """Of a row. Raises Bad."""
    try:
        return template.pieces(conversation(row, where, template.marks))
    except ValueError as error:
        text = str(error) if str(error).startswith(str(where)) else f"{where}: {error}"
        raise Bad(text, "rows that are no conversation") from error


# --- plain ----------------------------------------------------------------------------------------


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


def text(messages: list[Message]) -> str:
    """The conversation as a model reads it, without the end-of-text."""
    return "".join(piece.text for piece in plain(messages))


# --- the tokenizer's template ---------------------------------------------------------------------


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
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(
        x, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.date(2024, 1, 1).strftime(form)
    return environment.from_string(text)


def rendered(
    template: Any, names: dict[str, str], specials: dict[str, int], messages: list[Message]
) -> list[Piece]:
    """The pieces of a conversation: special tokens of the template by name, all else as text.

    names     bos_token and others, as the template calls them
    specials  ids of special tokens
    Raises    ValueError where the template refuses, or rewrites messages or earlier turns.
    """
    whole = render(template, names, messages)
    weights = answer_spans(template, names, messages, whole)
    cut, at = [], 0
    for part, is_template in parts(template, names, messages, whole):
        words = special_split(part, specials) if is_template else [(part, False)]
        for word, special in words:
            cut.append((at, word, special))
            at += len(word)
    return list(weighted(cut, weights))


def render(
    template: Any, names: dict[str, str], messages: list[Message], prompt: bool = False
) -> str:
    from jinja2 import TemplateError

    given = [{"role": role, "content": content} for role, content in messages]
    try:
        return template.render(messages=given, add_generation_prompt=prompt, **names)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def answer_spans(
    template: Any, names: dict[str, str], messages: list[Message], whole: str
) -> list[tuple[int, int]]:
    """(begin, end) of each answer in the text."""
    spans = []
    for number, (role, _) in enumerate(messages):
        if role == ANSWERS:
            before = render(template, names, messages[:number], prompt=True)
            upto = render(template, names, messages[: number + 1])
            if not (whole.startswith(upto) and upto.startswith(before)):
                raise ValueError(
                    "the chat template changes earlier turns when others follow, so it does not "
                    "say what an answer is. Use --chat-template plain."
                )
            spans.append((len(before), len(upto)))
    return spans


def parts(
    template: Any, names: dict[str, str], messages: list[Message], whole: str
) -> Iterator[tuple[str, bool]]:
    """(text, whether it is the template's own) of the conversation: what is a message's stays text
    whatever it looks like.
    """
    marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
    marked = render(template, names, [(r, m) for (r, _), m in zip(messages, marks, strict=True)])
    found = re.split("\ue000(\\d+)\ue001", marked)
    for change in (str, str.strip):  # many templates strip messages
        contents = [change(content) for _, content in messages]
        texts = [contents[int(t)] if n % 2 else t for n, t in enumerate(found)]
        if "".join(texts) == whole:
            yield from ((text, n % 2 == 0) for n, text in enumerate(texts) if text)
            return
    raise ValueError(
        "the chat template does not keep messages as they are, so special tokens of its own cannot "
        "be told from text that looks like them. Use --chat-template plain."
    )


def special_split(text: str, specials: dict[str, int]) -> list[tuple[str, bool]]:
    """(text, whether it is the name of a special token), the longest first."""
    names = sorted(specials, key=len, reverse=True)
    found = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [(word, n % 2 == 1) for n, word in enumerate(found) if word]


def weighted(cut: list[tuple[int, str, bool]], spans: list[tuple[int, int]]) -> Iterator[Piece]:
    """Neighbours of text together, cut where the weight changes."""
    edges = sorted({edge for span in spans for edge in span})
    pieces = []
    for at, word, special in cut:
        inner = [edge - at for edge in edges if at < edge < at + len(word)]
        for begin, end in itertools.pairwise([0, *inner, len(word)]):
            inside = any(b <= at + begin < e for b, e in spans)
            pieces.append(Piece(word[begin:end], int(inside), special))
    for (special, weight), group in itertools.groupby(pieces, lambda p: (p.special, p.weight)):
        if special:
            yield from group
        else:
            yield Piece("".join(piece.text for piece in group), weight)


# --- rows -----------------------------------------------------------------------------------------


def conversation(row: Any, where: Any, marks: tuple[str, ...] = MARKS) -> list[Message]:
    """The messages of a row.

    where   the row is, in messages.
    Raises  ValueError that names it, where there is nothing to learn or something else than
            messages.
    """
    found = [message(one, where, marks) for one in turns(row, where)]
    if ANSWERS not in dict(found):
        raise ValueError(
            f"{where} has no message of the role {ANSWERS} (roles: "
            f"{', '.join(role for role, _ in found) or 'none'}), so there is nothing to learn. "
            "Take the line out, or add the answer."
        )
    return found


def turns(row: Any, where: Any) -> list[Any]:
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
    raise ValueError(f"{where} is no conversation: it has {what}; {FORMS}. Correct the line.")


def message(one: Any, where: Any, marks: tuple[str, ...]) -> Message:
    """(role, content) of one message."""
    fields = one if isinstance(one, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if "from" in fields and "value" in fields:  # ShareGPT
        role, content = SHAREGPT_ROLES.get(fields["from"], fields["from"]), fields["value"]
    if not isinstance(role, str) or not isinstance(content, str):
        what = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise ValueError(
            f"{where} has a message without a role and a content that are text; it has "
            f"{what or type(one).__name__}: {FORMS}. Correct the line."
        )
    if role not in ROLES:
        raise ValueError(
            f"{where} has a message of the role {role!r}: expected one of {', '.join(ROLES)}. "
            "Rename the role, or take the line out."
        )
    if role == ANSWERS and not content.strip():
        raise ValueError(
            f"{where} has an empty answer, from which a model would learn to say nothing. Take the "
            "line out."
        )
    for mark in marks:
        if mark in content:
            raise ValueError(
                f"{where} has {mark} in a message of the role {role}: the template plain "
                "marks turns with it, so the message would be read as several. Take the line out, "
                "or write the mark in another way."
            )
    return role, content
