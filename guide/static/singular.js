"use strict";

/* A singular value after each step of optimizer.NEWTON_SCHULZ, from 0 steps on. */
guide.singularValues = (value, steps = 5) => {
  const found = [value];
  for (let i = 0; i < steps; i++) {
    const x = found[i];
    found.push(3.4445 * x - 4.775 * x ** 3 + 2.0315 * x ** 5);
  }
  return found;
};

guide.widgets.singular = (element) => {
  const { controls, report, picture } = guide.frame(element);
  const slider = guide.range(controls, "singular value", -30, 0, -10, draw);

  function draw() {
    const start = 10 ** (Number(slider.value) / 10), found = guide.singularValues(start), parts = [];
    for (const y of [0, 0.5, 1]) parts.push(`<polyline points="40,${170 - 120 * y} 470,${170 - 120 * y}" class="grid"/><text x="32" y="${174 - 120 * y}" text-anchor="end" class="faint">${y}</text>`);
    found.forEach((value, i) => {
      parts.push(`<rect x="${56 + 70 * i}" y="${170 - 120 * value}" width="44" height="${Math.max(1, 120 * value)}" rx="2" class="c${i ? 0 : 1}"/>`);
      parts.push(`<text x="${78 + 70 * i}" y="188" text-anchor="middle" class="faint">${i}</text>`);
      parts.push(`<text x="${78 + 70 * i}" y="${162 - 120 * value}" text-anchor="middle" class="ink">${value.toPrecision(2)}</text>`);
    });
    parts.push(`<text x="250" y="206" text-anchor="middle" class="ink">steps</text>`);
    picture.innerHTML = `<svg viewBox="0 0 490 214" width="490" class="drawing" role="img"><title>A singular value after each step</title>${parts.join("")}</svg>`;
    report.textContent = `${start.toPrecision(2)} becomes ${found[5].toPrecision(3)} after five steps.`;
  }
  draw();
};
