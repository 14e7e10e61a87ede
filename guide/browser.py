"""Inspect the built guide in Chromium, or print it: started by guide/build.py, in its environment.

    browser.py CHROMIUM SITE                      every page at three widths, light and dark
    browser.py CHROMIUM SITE --pdf PAGE FILE      print a page, with all answers open
    browser.py CHROMIUM SITE --shots FOLDER       pictures of all pages, to look through

Pages are opened as files, with the network blocked. Findings are console errors, requests that do
not name a file, a body that scrolls sideways, missing images, and low contrast (axe); in print also
what is cut or covered. Results of the scripts of guide/static are compared with those of Python
(COMPARED).
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS, HEIGHT = (360, 768, 1280), 900
SCHEMES = "light", "dark"
PAPER = 673  # pixels of an A4 page between the margins of guide.css
# In print nothing scrolls, and what has a fixed position covers text on each page.
PRINT_FAULTS = """() => {
  const shown = [...document.querySelectorAll("body *")].filter(e => e.getClientRects().length);
  return shown.flatMap(e => {
    const name = `${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 40)}`;
    const style = getComputedStyle(e);
    if (style.position === "fixed") return [`${name} has a fixed position`];
    const cut = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
    return cut ? [`${name} is cut on the right`] : [];
  });
}"""
CONTRAST = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
# The contrast of a text depends on its color and size and on what is behind it. Of the texts that
# share these in both color schemes, such as the words of listings, axe sees one, and takes a fifth
# of the time. It does not judge texts of one character, nor hidden ones, so these do not stand for
# others.
NOTE_LOOKS = """() => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const scheme = document.body.looks?.length ?? 0;
  for (const e of document.querySelectorAll("html, body, body *")) {
    const s = getComputedStyle(e);
    const shown = e.checkVisibility({
      opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true });
    const own = [shown, s.color, s.fontSize, s.fontWeight, s.opacity, s.backgroundColor];
    (e.looks ??= [])[scheme] =
      `${own} ${s.backgroundImage} ${s.position}; ${e.parentElement?.looks[scheme]}`;
  }
}"""
KEEP_ONE_OF_A_LOOK = """() => {
  const seen = new Set();
  for (const e of document.querySelectorAll("body *")) {
    if (e.children.length || e.textContent.trim().length < 2) continue;
    const look = e.looks.join(" ");
    seen.has(look) ? e.remove() : seen.add(look);
  }
}"""
# Scripts of guide/static beside what Python computed: (file of GUIDE_DATA, page, function of the
# cases that returns those that differ). The digest is FNV-1a, as in build.py.
COMPARED = (
    ("schedules", "schedules", """cases => {
  const digest = text => {
    let h = 0x811c9dc5;
    for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 0x01000193) >>> 0;
    return h;
  };
  return cases.filter(([p, v, m, expected]) => {
    const s = new guide.Schedule(p, v, m), found = [s.ticks, s.bubble];
    for (let rank = 0; rank < p; rank++)
      for (let tick = 0; tick < s.ticks; tick++) found.push(s.tasksAt(tick, rank));
    return digest(JSON.stringify(found)) !== expected;
  }).map(one => one.slice(0, 3).join(", "));
}"""),
    ("permutations", "dataset", """cases => cases.filter(([size, seed, epoch, order]) =>
  JSON.stringify(guide.permutation(size, guide.permutationKeys[`${seed} ${epoch}`])) !==
  JSON.stringify(order)).map(one => one.slice(0, 3))"""),
    ("routings", "experts", """cases => cases.filter(
  ([choices, experts, capacity, tile, slots, tiles]) =>
    JSON.stringify(guide.assignSlots(choices, experts, capacity)) !== JSON.stringify(slots) ||
    guide.tiles(choices, experts, tile) !== tiles)"""),
    ("singular_values", "optimizer", """cases => cases.filter(([value, after]) =>
  Math.abs(guide.singularValues(value)[5] - after) > 1e-12)"""),
)  # fmt: skip


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
    for scheme in SCHEMES:
        tab.emulate_media(media="screen", color_scheme=scheme)
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": HEIGHT})
            over = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if over > 0:
                yield f"{page.name} is {over} px wider than {width} px, {scheme}"
        tab.evaluate(NOTE_LOOKS)
        tab.set_viewport_size({"width": PAPER, "height": HEIGHT})
        tab.emulate_media(media="print")
        for fault in tab.evaluate(PRINT_FAULTS):
            yield f"{page.name} in print, {scheme}: {fault}"
    tab.set_viewport_size({"width": max(WIDTHS), "height": HEIGHT})
    tab.evaluate(KEEP_ONE_OF_A_LOOK)
    for scheme in SCHEMES:
        tab.emulate_media(media="screen", color_scheme=scheme)
        for violation in Axe().run(tab, options=CONTRAST).response["violations"]:
            for node in violation["nodes"][:5]:
                yield f"{page.name}, {scheme}: low contrast: {node['html'][:120]}"


def compare(tab: Page, site: Path, name: str, page: str, script: str) -> Iterator[str]:
    tab.goto((site / f"{page}.html").as_uri())
    cases = json.loads(Path(os.environ["GUIDE_DATA"], f"{name}.json").read_text())
    for case in tab.evaluate(script, cases):
        yield f"{page}.html differs from {name} by Python for {case}"


def main(chromium: str, site: Path, arguments: list[str]) -> int:
    pages = sorted(page for page in site.glob("*.html") if page.name != "search.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found: list[str] = []
        tab = new_tab(browser, found)
        if arguments[:1] == ["--pdf"]:
            tab.goto(Path(arguments[1]).as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            tab.pdf(
                path=arguments[2],
                format="A4",
                prefer_css_page_size=True,
                print_background=True,
                outline=True,
                tagged=True,
            )
            return 0
        if arguments[:1] == ["--shots"]:
            for page, scheme, width in itertools.product(pages, SCHEMES, WIDTHS):
                tab.emulate_media(color_scheme=scheme)
                tab.set_viewport_size({"width": width, "height": HEIGHT})
                tab.goto(page.as_uri())
                name = f"{page.stem}-{width}-{scheme}.png"
                tab.screenshot(path=f"{arguments[1]}/{name}", full_page=True)
            return 0
        for page in pages:
            found += [*inspect(tab, page)]
        for name, page, script in COMPARED:
            found += [*compare(tab, site, name, page, script)]
    print("\n".join(found) or f"{len(pages)} pages, no findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))
