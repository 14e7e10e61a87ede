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
"""

from typing import Any

TEMPLATE = "plain"
ANSWERS = "assistant"  # the role whose text is learned
ROLES = ("system", "user", ANSWERS)
END = "<|end|>"
MARKS = (END, *(f"<|{role}|>" for role in ROLES))

Message = tuple[str, str]  # role, content
Piece = tuple[str, int]  # text, and its loss weight

FORMS = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, or "prompt" with "answer" or "completion"'
)


def pieces(messages: list[Message]) -> list[Piece]:
    """The conversation's text, cut where the loss weight changes."""
    cut, given = [], ""
    for number, (role, content) in enumerate(messages):
        given += "\n" * (number > 0) + f"<|{role}|>\n"
        if role == ANSWERS:
            cut += [(given, 0), (content + END, 1)]
            given = ""
        else:
            given += content + END
    return [*cut, (given, 0)] if given else cut


def text(messages: list[Message]) -> str:
    """The conversation as a model reads it, without the end-of-text."""
    return "".join(part for part, _ in pieces(messages))


def example() -> list[Piece]:
    """What the template makes of one word in each role: another template makes another."""
    return pieces([(role, role) for role in (*ROLES, "user", ANSWERS)])


def conversation(row: Any, place: str) -> list[Message]:
    """The messages of a JSON line.

    place   of the line, as file:number.
    Raises  ValueError that names it, where there is nothing to learn or something else than
            messages.
    """
    found = [message(one, place) for one in turns(row, place)]
    if ANSWERS not in dict(found):
        raise ValueError(
            f"{place} has no message of the role {ANSWERS} (roles: "
            f"{', '.join(role for role, _ in found) or 'none'}), so there is nothing to learn. "
            "Take the line out, or add the answer."
        )
    return found


def turns(row: Any, place: str) -> list[Any]:
    """The messages as the line has them, in either form."""
    fields = row if isinstance(row, dict) else {}
    if isinstance(fields.get("messages"), list):
        return fields["messages"]
    for name in ("answer", "completion"):
        if "prompt" in fields and name in fields:
            asked = {"role": "user", "content": fields["prompt"]}
            return [asked, {"role": ANSWERS, "content": fields[name]}]
    what = f"the fields {', '.join(fields) or 'none'}" if fields is row else type(row).__name__
    raise ValueError(f"{place} is no conversation: it has {what}; {FORMS}. Mend the line.")


def message(one: Any, place: str) -> Message:
    """(role, content) of one message."""
    fields = one if isinstance(one, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        what = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise ValueError(
            f"{place} has a message without a role and a content that are text; it has "
            f"{what or type(one).__name__}: {FORMS}. Mend the line."
        )
    if role not in ROLES:
        raise ValueError(
            f"{place} has a message of the role {role!r}: expected one of {', '.join(ROLES)}. "
            "Rename the role, or take the line out."
        )
    if role == ANSWERS and not content.strip():
        raise ValueError(
            f"{place} has an empty answer, from which a model would learn to say nothing. Take the "
            "line out."
        )
    for mark in MARKS:
        if mark in content:
            raise ValueError(
                f"{place} has {mark} in a message of the role {role}: the template {TEMPLATE} "
                "marks turns with it, so the message would be read as several. Take the line out, "
                "or write the mark in another way."
            )
    return role, content
