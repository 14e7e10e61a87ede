"""Directives and roles of the guide, as a Sphinx extension.

    {code} FILE NAME        quotes code of the project, with file and line
    {fact}`name`            shows a fact of facts.json, with a badge of its kind
    {problem} NUMBER        a problem; its explanation stands below a line with +++
    {svg} NAME              inlines a figure of guide/figures.py, which follows the page's colors
    {made-table} NAME       a table of guide/figures.py
    {widget} NAME           a figure that a script of guide/static makes interactive
    {takeaway}, {omitted}   the boxes Takeaway and Not done here

build.py writes facts, answers and figures to the folder of the environment variable GUIDE_DATA.
"""

import html
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pages

DATA = Path(os.environ.get("GUIDE_DATA", pages.ROOT / ".cache/guide/data"))
KINDS = {
    "exact": "follows from the code or its arithmetic",
    "predicted": "predicted by planning/cost.py",
    "compiled": "counted in a compiled program",
    "measured": "measured",
}


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


class Code(SphinxDirective):
    """Quote code. Options: caption."""

    required_arguments = 2
    option_spec: ClassVar = {"caption": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        file, name = self.arguments
        try:
            found = pages.excerpt(file, name)
        except pages.PageError as error:
            raise self.error(str(error)) from error
        language = {".py": "python", ".toml": "toml", ".sh": "bash"}[Path(file).suffix]
        block = nodes.literal_block(found.text, found.text, language=language)
        where = f"{file}, line {found.line}"
        caption = self.options.get("caption", "")
        title = nodes.container(classes=["code-title"])
        title += nodes.paragraph("", "", nodes.literal(where, where), nodes.Text(f" {caption}"))
        return [nodes.container("", title, block, classes=["quoted"])]


class Fact(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        facts = load("facts.json")
        if self.text not in facts:
            message = self.inliner.reporter.error(
                f"there is no fact {self.text!r}", line=self.lineno
            )
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        fact = facts[self.text]
        parts = (KINDS[fact["kind"]], fact["command"], fact["hardware"], fact["commit"])
        title = html.escape("; ".join(part for part in parts if part), quote=True)
        text = html.escape(fact["text"])
        shown = f'<span class="fact {fact["kind"]}" title="{title}">{text}</span>'
        return [nodes.raw("", shown, format="html")], []


class Problem(SphinxDirective):
    """A problem with a folded answer."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = dict.fromkeys(("answer", "code", "accept"), directives.unchanged)

    def run(self) -> list[nodes.Node]:
        number = self.arguments[0]
        cut = [i for i, line in enumerate(self.content) if line.strip() == "+++"]
        if len(cut) != 1:
            raise self.error(f"problem {number} needs one line +++ before its explanation")
        box = nodes.container(classes=["problem"], ids=[f"problem-{number.replace('.', '-')}"])
        box += nodes.paragraph("", "", nodes.strong("", f"Problem {number}"))
        self.state.nested_parse(self.content[: cut[0]], self.content_offset, box)
        answer = nodes.container()
        if "answer" in self.options:
            value = load("answers.json")[number]
            answer += nodes.paragraph(
                "", "", nodes.strong("", "Answer: "), nodes.literal("", value)
            )
        else:
            command = f"./run.sh python guide/check.py {number} my_answer.py"
            stub = f"guide/problems/{self.options['code']}.py"
            box += nodes.paragraph(
                "", "", nodes.Text("Stub: "), nodes.literal("", stub),
                nodes.Text(". Check yours by "), nodes.literal("", command), nodes.Text("."),
            )  # fmt: skip
        self.state.nested_parse(self.content[cut[0] + 1 :], self.content_offset, answer)
        fold = '<details class="answer"><summary>Answer</summary>'
        box += nodes.raw("", fold, format="html")
        box += answer
        box += nodes.raw("", "</details>", format="html")
        return [box]


class Svg(SphinxDirective):
    """Inline a figure. The content is its caption."""

    required_arguments = 1
    has_content = True

    def picture(self) -> str:
        path = DATA / "figures" / f"{self.arguments[0]}.svg"
        if not path.is_file():
            raise self.error(f"guide/figures.py draws no {self.arguments[0]!r}")
        return path.read_text()

    def run(self) -> list[nodes.Node]:
        figure = nodes.container(classes=["picture"])
        figure += nodes.raw("", f'<div class="scroll">{self.picture()}</div>', format="html")
        caption = nodes.container(classes=["caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        figure += caption
        return [figure]


class Table(SphinxDirective):
    """Insert a table of guide/figures.py."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = DATA / "tables" / f"{self.arguments[0]}.html"
        if not path.is_file():
            raise self.error(f"guide/figures.py makes no table {self.arguments[0]!r}")
        return [nodes.raw("", f'<div class="scroll">{path.read_text()}</div>', format="html")]


class Widget(Svg):
    """A figure that guide/static/NAME.js makes interactive. Without scripts, the figure remains."""

    option_spec: ClassVar = {"figure": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.arguments[0] = self.options.get("figure", name)
        picture = f'<div class="scroll">{self.picture()}</div>'
        if (DATA / f"{name}.json").is_file():
            # "<" cannot end the script early in this form.
            data = json.dumps(load(f"{name}.json")).replace("<", "\\u003c")
            picture += f'<script type="application/json">{data}</script>'
        box = nodes.container(classes=["picture", "widget-box"])
        html_text = f'<div class="widget" data-widget="{name}">{picture}</div>'
        box += nodes.raw("", html_text, format="html")
        caption = nodes.container(classes=["caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        box += caption
        return [box]


class Box(Directive):
    has_content = True
    title = ""

    def run(self) -> list[nodes.Node]:
        box = nodes.container(classes=["box", self.title.lower().replace(" ", "-")])
        box += nodes.paragraph("", "", nodes.strong("", self.title))
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


class Takeaway(Box):
    title = "Takeaway"


class Omitted(Box):
    title = "Not done here"


def visit_math(self: Any, node: nodes.Node) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    mathml = convert(node.astext(), display=display)
    self.body.append(f'<div class="scroll">{mathml}</div>' if display == "block" else mathml)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    directives_by_name = {
        "code": Code,
        "problem": Problem,
        "svg": Svg,
        "made-table": Table,
        "widget": Widget,
        "takeaway": Takeaway,
        "omitted": Omitted,
    }
    for name, directive in directives_by_name.items():
        app.add_directive(name, directive, override=True)
    app.add_role("fact", Fact())
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
