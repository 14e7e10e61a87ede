"use strict";

/* Starts each widget of a page. A widget registers itself as guide.widgets[NAME] = element => ... */
window.guide = { widgets: {} };

document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".widget")) {
    const start = guide.widgets[element.dataset.widget];
    if (start) start(element);
  }
});

window.addEventListener("beforeprint", () => {
  for (const answer of document.querySelectorAll("details.answer")) answer.open = true;
});
