"use strict";

/* Faults of a page that guide/browser.py looks for in Chromium: each function returns their texts. */
const visible = (query) => [...document.querySelectorAll(query)].filter((e) => e.getClientRects().length);
const box = (e) => e.getBoundingClientRect();
const named = (e, fault) => `${e.textContent.trim().split(/\s+/).slice(0, 5).join(" ")}: ${fault}`;
const background = (e) => getComputedStyle(e).backgroundColor.match(/[\d.]+/g).map(Number);

/* Whether a part of a formula lies outside of its box, which cuts it. */
const isCut = (e) => e.scrollHeight > e.clientHeight || [...e.querySelectorAll("*")].map(box).some((b) => {
  const { left, top, right, bottom } = box(e);
  return b.width && (b.left < left - 1 || b.top < top || b.right > right + 1 || b.bottom > bottom);
});

/* Whether the color of an element is opaque, and can be told from that of the page. */
const isPanel = (e) => {
  const page = background(document.body), own = background(e);
  return own.length === 3 && own.reduce((sum, value, i) => sum + Math.abs(value - page[i]), 0) >= 16;
};

const scrolls = (e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX !== "visible";

/* Whether two boxes have less than 8 px between them. */
const touch = (a, b) => a.left < b.right + 8 && b.left < a.right + 8 && a.top < b.bottom && b.top < a.bottom;

const faults = {
  layout() {
    const wide = innerWidth >= 1280, drawer = visible(".toc-drawer")[0];
    const icons = visible(".theme-toggle, .toc-overlay-icon, .nav-overlay-icon").map(box);
    const found = [
      ...visible(".formula").filter(isCut).map((e) => named(e, "the formula is cut")),
      ...visible(".highlight").filter((e) => !isPanel(e)).map((e) => named(e, "the code has no panel")),
    ];
    if (icons.some((a, i) => icons.slice(i + 1).some((b) => touch(a, b)))) found.push("two icons touch");
    if (!wide) return found;
    if (drawer && box(drawer).right > innerWidth) found.push("'on this page' is not visible");
    return found.concat(visible(".scroll, pre, table, .table-wrapper").filter(scrolls)
      .map((e) => named(e, `scrolls by ${e.scrollWidth - e.clientWidth} px`)));
  },

  /* In print nothing scrolls, and what has a fixed position covers text on each page. */
  print() {
    return visible("body *").flatMap((e) => {
      const name = `${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 40)}`;
      const style = getComputedStyle(e);
      if (style.position === "fixed") return [`${name} has a fixed position`];
      const cut = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
      return cut ? [`${name} is cut on the right`] : [];
    });
  },

  /* Texts with the same tags and classes up to the body look alike, such as the words of listings. axe
     sees one of them, which saves minutes. It does not judge texts of one character. */
  keepOneOfALook() {
    const look = (e) => e ? `${look(e.parentElement)} ${e.tagName} ${e.getAttribute("class")}` : "";
    const seen = new Set();
    for (const e of document.querySelectorAll("body *")) {
      if (e.children.length || e.textContent.trim().length < 2) continue;
      seen.has(look(e)) ? e.remove() : seen.add(look(e));
    }
  },
};
