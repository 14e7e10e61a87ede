"""Directives and roles of the guide, as a Sphinx extension.

    {code} FILE NAME        quotes code of the project, with file and line
    {fact}`name`            shows a fact of facts.json, with a badge of its kind
    {chapter}`PAGE`         shows the number of a chapter, and links to it
    {minutes}`PAGE..`       shows how long some pages take to read
    {problem} NUMBER        a problem; its explanation stands below a line with +++
    {svg} NAME              inlines a figure of guide/figures.py, which follows the page's colors
    {made-table} NAME       a table of guide/figures.py
    {widget} NAME           a figure that a script of guide/static makes interactive
    {takeaway}, {omitted}   the boxes Takeaway and Not done here

build.py writes facts, answers, figures and tables to the file GUIDE_DATA.
"""

import html
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pages
from docutils import nodes
from docutils.parsers.rst import directives
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

DATA = json.loads(Path(os.environ["GUIDE_DATA"]).read_text())
KINDS = {
    "exact": "follows from the code or its arithmetic",
    "predicted": "predicted by planning/cost.py",
    "compiled": "counted in a compiled program",
    "measured": "measured",
}
BOXES = {"takeaway": "Takeaway", "omitted": "Not done here"}


def raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def scrolling(text: str, kind: str = "") -> str:
    return f'<div class="scroll {kind}">{text}</div>'


class Code(SphinxDirective):
    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        file, name = self.arguments
        try:
            found = pages.excerpt(file, name)
        except pages.PageError as error:
            raise self.error(str(error)) from error
        block = nodes.literal_block(found.text, found.text, language="python")
        where = nodes.paragraph("", "", nodes.literal("", f"{file}, line {found.line}"))
        title = nodes.container("", where, classes=["code-title"])
        return [nodes.container("", title, block, classes=["quoted"])]


class Fact(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        fact = DATA["facts"][self.text]
        parts = (KINDS[fact["kind"]], *(fact.get(key) for key in ("command", "hardware", "commit")))
        title = html.escape("; ".join(part for part in parts if part))
        text = html.escape(fact["text"])
        return [raw(f'<span class="fact {fact["kind"]}" title="{title}">{text}</span>')], []


class Chapter(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        target = {"refdomain": "std", "reftype": "doc", "reftarget": self.text}
        number = nodes.inline("", str(pages.number(self.text)))
        options = {"refdoc": self.env.docname, "refexplicit": True, "refwarn": True}
        return [addnodes.pending_xref("", number, **target, **options)], []


class Minutes(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        minutes = sum(map(pages.minutes, self.text.split()))
        return [raw(f'<span class="minutes">{minutes} min</span>')], []


class Problem(SphinxDirective):
    """A problem with a folded answer."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = dict.fromkeys(("answer", "code", "accept"), directives.unchanged)

    def run(self) -> list[nodes.Node]:
        number, text = self.arguments[0], "\n".join(self.content)
        if text.count("\n+++\n") != 1:
            raise self.error(f"problem {number} needs one line +++ before its explanation")
        question, explanation = text.split("\n+++\n")
        if "answer" in self.options:
            explanation = f"**Answer:** `{DATA['answers'][number]}`\n\n{explanation}"
        else:
            stub = f"guide/problems/{self.options['code']}.py"
            command = f"./run.sh python guide/check.py {number} my_answer.py"
            question += f"\n\nStub: `{stub}`. Check yours by `{command}`."
        box = nodes.container(classes=["problem"], ids=[f"problem-{number.replace('.', '-')}"])
        box += self.parse(f"**Problem {number}**\n\n{question}")
        box += raw('<details class="answer"><summary>Answer</summary>')
        box += nodes.container("", *self.parse(explanation))
        box += raw("</details>")
        return [box]

    def parse(self, text: str) -> list[nodes.Node]:
        return self.parse_text_to_nodes(text, offset=self.content_offset)


class Table(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [raw(scrolling(DATA["tables"][self.arguments[0]]))]


class Svg(SphinxDirective):
    """Inline a figure. The content is its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        caption = nodes.container("", *self.parse_content_to_nodes(), classes=["caption"])
        return [nodes.container("", raw(self.picture()), caption, classes=["picture"])]

    def picture(self) -> str:
        return scrolling(DATA["figures"][self.arguments[0]])


class Widget(Svg):
    """A figure that guide/static/NAME.js makes interactive. Without scripts, the figure remains."""

    option_spec: ClassVar = {"figure": directives.unchanged_required}

    def picture(self) -> str:
        name = self.arguments[0]
        picture = scrolling(DATA["figures"][self.options["figure"]])
        if name in DATA["widgets"]:
            # "<" cannot end the script early in this form.
            data = json.dumps(DATA["widgets"][name]).replace("<", "\\u003c")
            picture += f'<script type="application/json">{data}</script>'
        return f'<div class="widget" data-widget="{name}">{picture}</div>'


class Box(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        title = nodes.paragraph("", "", nodes.strong("", BOXES[self.name]))
        content = self.parse_content_to_nodes()
        return [nodes.container("", title, *content, classes=["box", self.name])]


def visit_math(self: Any, node: nodes.Node) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    mathml = convert(node.astext(), display=display)
    self.body.append(scrolling(mathml, "formula") if display == "block" else mathml)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in {
        "code": Code,
        "problem": Problem,
        "svg": Svg,
        "made-table": Table,
        "widget": Widget,
        **dict.fromkeys(BOXES, Box),
    }.items():
        app.add_directive(name, directive, override=True)
    app.add_role("fact", Fact())
    app.add_role("chapter", Chapter())
    app.add_role("minutes", Minutes())
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
