"use strict";

/* Starts each widget of a page. A widget registers itself as guide.widgets[NAME] = element => ... */
window.guide = { widgets: {} };

/* Add controls above the picture of a widget, and a line of text below it. */
guide.frame = (element) => {
  const controls = document.createElement("div"), report = document.createElement("p");
  controls.className = "controls";
  report.setAttribute("aria-live", "polite");
  element.prepend(controls);
  element.append(report);
  return { controls, report, picture: element.querySelector(".scroll") };
};

/* Add a labelled list of names to the controls of a widget. */
guide.choice = (controls, text, names, draw) => {
  const label = document.createElement("label"), input = document.createElement("select");
  for (const name of names) input.add(new Option(name, name));
  label.append(text + " ", input);
  controls.append(label);
  input.addEventListener("input", draw);
  return input;
};

/* Draw horizontal bars. rows: [name, share of the longest, text, color] */
guide.bars = (title, rows) => {
  const parts = rows.map(([name, share, text, kind], i) => {
    const y = 6 + 30 * i, width = Math.max(1, 300 * share);
    return `<text x="84" y="${y + 15}" text-anchor="end" class="ink">${name}</text>` +
      `<rect x="92" y="${y}" width="${width}" height="22" rx="2" class="${kind}"/>` +
      `<text x="${98 + width}" y="${y + 15}" class="ink">${text}</text>`;
  });
  const size = `viewBox="0 0 500 ${10 + 30 * rows.length}" width="500"`;
  return `<svg ${size} class="drawing" role="img"><title>${title}</title>${parts.join("")}</svg>`;
};

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
