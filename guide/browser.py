"""Inspect the built guide in Chromium, or print it: started by guide/build.py, in its environment.

    browser.py CHROMIUM SITE                      every page at three widths, light and dark
    browser.py CHROMIUM SITE --pdf PAGE FILE      print a page, with all answers open
    browser.py CHROMIUM SITE --shots FOLDER       pictures of all pages, to look through

Pages are opened as files, with the network blocked. Findings are console errors, requests that do
not name a file, a body that scrolls sideways, missing images, and low contrast (axe). The schedule
of guide/static/schedule.js is compared with GUIDE_DATA/schedules.json, which Python wrote.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (360, 768, 1280)
CONTRAST = {"runOnly": ["color-contrast"]}
# The digest is FNV-1a, as in build.py: one number for each schedule.
SCHEDULES = """cases => {
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
}"""


def opened(browser: Browser, page: Path, width: int, scheme: str, found: list[str]) -> Page:
    """Open a page, and append its errors and requests to `found`."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    tab = context.new_page()
    name = f"{page.name} at {width} px, {scheme}"

    def request(seen: object) -> None:
        if not seen.url.startswith(("file:", "data:")):
            found.append(f"{name}: requests {seen.url}")

    def failed(seen: object) -> None:
        found.append(f"{name}: {seen.url} is missing")

    tab.on("request", request)
    tab.on("requestfailed", failed)
    tab.on("console", lambda m: m.type == "error" and found.append(f"{name}: console: {m.text}"))
    tab.on("pageerror", lambda error: found.append(f"{name}: {error}"))
    tab.goto(page.as_uri())
    return tab


def inspect(browser: Browser, page: Path) -> Iterator[str]:
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            found: list[str] = []
            tab = opened(browser, page, width, scheme, found)
            name = f"{page.name} at {width} px, {scheme}"
            over = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if over > 0:
                found.append(f"{name}: the page is {over} px wider than the window")
            if tab.evaluate("[...document.images].some(i => !i.naturalWidth)"):
                found.append(f"{name}: an image is missing")
            if width == WIDTHS[-1]:
                tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                for violation in Axe().run(tab, options=CONTRAST).response["violations"]:
                    for node in violation["nodes"][:5]:
                        found.append(f"{name}: low contrast: {node['html'][:120]}")
            tab.context.close()
            yield from found


def compare_schedules(browser: Browser, page: Path, data: Path) -> Iterator[str]:
    found: list[str] = []
    tab = opened(browser, page, 1280, "light", found)
    for case in tab.evaluate(SCHEDULES, json.loads(data.read_text())):
        yield f"schedule.js differs from schedule.py for pipeline, virtual, microbatches = {case}"
    tab.context.close()
    yield from found


def compare_permutations(browser: Browser, page: Path, data: Path) -> Iterator[str]:
    found: list[str] = []
    tab = opened(browser, page, 1280, "light", found)
    for size, seed, epoch, order in json.loads(data.read_text()):
        keys = f"guide.permutationKeys['{seed} {epoch}']"
        if tab.evaluate(f"guide.permutation({size}, {keys})") != order:
            yield f"permutation.js differs for size, seed, epoch = {size}, {seed}, {epoch}"
    tab.context.close()
    yield from found


def compare_routings(browser: Browser, page: Path, data: Path) -> Iterator[str]:
    found: list[str] = []
    tab = opened(browser, page, 1280, "light", found)
    compare = """cases => cases.filter(([choices, experts, capacity, tile, slots, tiles]) =>
      JSON.stringify(guide.assignSlots(choices, experts, capacity)) !== JSON.stringify(slots) ||
      guide.tiles(choices, experts, tile) !== tiles)"""
    for case in tab.evaluate(compare, json.loads(data.read_text())):
        yield f"dispatch.js differs from model.py for {case}"
    tab.context.close()
    yield from found


def main(chromium: str, site: Path, arguments: list[str]) -> int:
    pages = sorted(page for page in site.glob("*.html") if page.name != "search.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if arguments[:1] == ["--pdf"]:
            tab = opened(browser, Path(arguments[1]), 1280, "light", [])
            tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            tab.pdf(path=arguments[2], format="A4", margin=dict.fromkeys(("top", "bottom"), "15mm"))
            return 0
        if arguments[:1] == ["--shots"]:
            for page in pages:
                for width in WIDTHS:
                    for scheme in ("light", "dark"):
                        tab = opened(browser, page, width, scheme, [])
                        name = f"{page.stem}-{width}-{scheme}.png"
                        tab.screenshot(path=f"{arguments[1]}/{name}", full_page=True)
            return 0
        found = [finding for page in pages for finding in inspect(browser, page)]
        found += compare_schedules(
            browser, site / "schedules.html", Path(os.environ["GUIDE_DATA"], "schedules.json")
        )
        data = Path(os.environ["GUIDE_DATA"], "permutations.json")
        found += compare_permutations(browser, site / "dataset.html", data)
        data = Path(os.environ["GUIDE_DATA"], "routings.json")
        found += compare_routings(browser, site / "experts.html", data)
    print("\n".join(found) or f"{len(pages)} pages, no findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))
