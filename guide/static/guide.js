"use strict";

/* Starts each widget of a page. A widget registers itself as guide.widgets[NAME] = element => ... */
window.guide = { widgets: {} };

/* Add a labelled slider to the controls of a widget. */
guide.range = (controls, text, min, max, value, draw) => {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "range", min, max, value });
  label.append(text + " ", input);
  controls.append(label);
  input.addEventListener("input", draw);
  return input;
};

document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".widget")) {
    const start = guide.widgets[element.dataset.widget];
    if (start) start(element);
  }
});

window.addEventListener("beforeprint", () => {
  for (const answer of document.querySelectorAll("details.answer")) answer.open = true;
});
