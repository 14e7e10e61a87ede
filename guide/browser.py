"""Inspect the built guide in Chromium, or print it: started by guide/build.py, in its environment.

    browser.py CHROMIUM SITE                      every page at four widths, light and dark
    browser.py CHROMIUM SITE --pdf PAGE FILE      print a page, with all answers open

Pages are opened as files, with the network blocked. Findings are console errors, requests that do
not name a file, a body that scrolls sideways, missing images, faults of the layout (faults.js) and
low contrast (axe); in print also what is cut or covered. Results of the scripts of guide/static are
compared with those of Python (COMPARED).
"""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

WIDTHS, HEIGHT = (360, 768, 1280, 1600), 900
SCHEMES = "light", "dark"
PAPER = 673  # pixels of an A4 page between the margins of guide.css
OPEN = "document.querySelectorAll('details').forEach(d => d.open = true)"
CONTRAST = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
# Scripts of guide/static beside what Python computed: {cases of GUIDE_DATA: (page, function)}. The
# function returns what the script finds for the input of a case.
COMPARED = {
    "schedules": ("schedules", """([p, v, m]) => {
      const s = new guide.Schedule(p, v, m), found = [s.ticks, s.bubble];
      for (let rank = 0; rank < p; rank++)
        for (let tick = 0; tick < s.ticks; tick++) found.push(s.tasksAt(tick, rank));
      return found;
    }"""),
    "permutations": ("dataset", """([size, seed, epoch]) =>
      guide.permutation(size, guide.permutationKeys[`${seed} ${epoch}`])"""),
    "routings": ("experts", """([choices, experts, capacity, tile]) =>
      [guide.assignSlots(choices, experts, capacity), guide.tiles(choices, experts, tile)]"""),
    "singular_values": ("optimizer", "value => guide.singularValues(value)[5].toPrecision(9)"),
}  # fmt: skip


def new_tab(browser: Browser, found: list[str]) -> Page:
    """Return a tab that appends errors and requests of its pages to `found`."""
    tab = browser.new_page(viewport={"width": max(WIDTHS), "height": HEIGHT}, offline=True)

    def note(what: str) -> None:
        found.append(f"{Path(tab.url).name}: {what}")

    def request(seen: object) -> None:
        if not seen.url.startswith(("file:", "data:")):
            note(f"requests {seen.url}")

    tab.on("request", request)
    tab.on("requestfailed", lambda seen: note(f"{seen.url} is missing"))
    tab.on("console", lambda seen: seen.type == "error" and note(f"console: {seen.text}"))
    tab.on("pageerror", lambda error: note(str(error)))
    return tab


def inspect(tab: Page, page: Path) -> Iterator[str]:
    tab.goto(page.as_uri())
    if tab.evaluate("[...document.images].some(i => !i.naturalWidth)"):
        yield f"{page.name}: an image is missing"
    tab.evaluate(OPEN)
    tab.add_script_tag(path=Path(__file__).with_name("faults.js"))
    for width in WIDTHS:  # outside: a change of it takes longer
        tab.set_viewport_size({"width": width, "height": HEIGHT})
        for scheme in SCHEMES:
            tab.emulate_media(media="screen", color_scheme=scheme)
            over = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if over > 0:
                yield f"{page.name} is {over} px wider than {width} px, {scheme}"
            for fault in tab.evaluate("faults.layout()"):
                yield f"{page.name} at {width} px, {scheme}: {fault}"
    tab.set_viewport_size({"width": PAPER, "height": HEIGHT})
    for scheme in SCHEMES:
        tab.emulate_media(media="print", color_scheme=scheme)
        for fault in tab.evaluate("faults.print()"):
            yield f"{page.name} in print, {scheme}: {fault}"
    tab.set_viewport_size({"width": max(WIDTHS), "height": HEIGHT})
    tab.evaluate("faults.keepOneOfALook()")
    for scheme in SCHEMES:
        tab.emulate_media(media="screen", color_scheme=scheme)
        for violation in Axe().run(tab, options=CONTRAST).response["violations"]:
            for node in violation["nodes"][:5]:
                yield f"{page.name}, {scheme}: low contrast: {node['html'][:120]}"


def compare(tab: Page, site: Path, name: str) -> Iterator[str]:
    page, script = COMPARED[name]
    tab.goto((site / f"{page}.html").as_uri())
    cases = json.loads(Path(os.environ["GUIDE_DATA"]).read_text())["cases"][name]
    inputs = [given for given, _ in cases]
    found = tab.evaluate(f"all => all.map({script}).map(one => JSON.stringify(one))", inputs)
    for (given, expected), own in zip(cases, found, strict=True):
        if own != expected:
            yield f"{page}.html differs from {name} by Python for {given}"


def launch(playwright: Playwright, chromium: str) -> Browser:
    return playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


def inspect_all(chromium: str, site: Path, pages: list[Path], names: list[str]) -> list[str]:
    """Return the findings of some pages, and of some comparisons."""
    found: list[str] = []
    with sync_playwright() as playwright:
        tab = new_tab(launch(playwright, chromium), found)
        for page in pages:
            found += inspect(tab, page)
        for name in names:
            found += compare(tab, site, name)
    return found


def print_page(chromium: str, page: Path, file: str) -> None:
    with sync_playwright() as playwright:
        tab = new_tab(launch(playwright, chromium), [])
        tab.goto(page.as_uri())
        tab.evaluate(OPEN)
        options = {"print_background": True, "outline": True, "tagged": True}
        tab.pdf(path=file, format="A4", prefer_css_page_size=True, **options)


def main(chromium: str, site: Path, arguments: list[str]) -> int:
    if arguments[:1] == ["--pdf"]:
        print_page(chromium, Path(arguments[1]), arguments[2])
        return 0
    pages = sorted(page for page in site.glob("*.html") if page.name != "search.html")
    with ThreadPoolExecutor() as pool:  # two browsers, as a tab uses one core most of the time
        work = [(chromium, site, pages[i::2], [*COMPARED][i::2]) for i in range(2)]
        found = [
            line for lines in pool.map(inspect_all, *zip(*work, strict=True)) for line in lines
        ]
    print("\n".join(found) or f"{len(pages)} pages, no findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))
