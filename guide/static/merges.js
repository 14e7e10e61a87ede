"use strict";

/* The joins of byte-pair encoding. The steps of each word come from Python, in the page. */
guide.widgets.merges = (element) => {
  const data = JSON.parse(element.querySelector("script").textContent);
  const controls = document.createElement("div");
  controls.className = "controls";
  const box = (text, input) => {
    const label = document.createElement("label");
    label.append(text + " ", input);
    controls.append(label);
    return input;
  };
  const word = box("word", document.createElement("select"));
  for (const name of Object.keys(data)) word.add(new Option(name.trim(), name));
  const joins = box("joins", Object.assign(document.createElement("input"), { type: "range", min: 0, value: 0 }));
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  const picture = element.querySelector(".scroll");
  element.prepend(controls);
  element.append(report);

  function draw() {
    const steps = data[word.value];
    joins.max = steps.length - 1;
    const pieces = steps[Math.min(Number(joins.value), steps.length - 1)], parts = [];
    let x = 4;
    for (const piece of pieces) {
      const width = 24 * piece.length - 3;
      parts.push(`<rect x="${x}" y="6" width="${width}" height="28" rx="2" class="c${Math.min(piece.length - 1, 5)}"/>`);
      parts.push(`<text x="${x + width / 2}" y="25" text-anchor="middle" class="on">${piece.replace(" ", "\u2423").replace("<", "&lt;")}</text>`);
      x += width + 3;
    }
    picture.innerHTML = `<svg viewBox="0 0 ${x + 4} 40" width="${x + 4}" class="drawing" role="img"><title>Pieces of ${word.value.trim()}</title>${parts.join("")}</svg>`;
    report.textContent = `${pieces.length} ${pieces.length === 1 ? "piece" : "pieces"} after ${joins.value} of ${steps.length - 1} joins.`;
  }
  word.addEventListener("change", () => { joins.value = 0; draw(); });
  joins.addEventListener("input", draw);
  draw();
};
