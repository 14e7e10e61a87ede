"use strict";

/* Operations and bytes of a bfloat16 product of n tokens with a matrix of D x F. */
guide.product = (n, D, F) => ({ flops: 2 * n * D * F, bytes: 2 * (n * D + D * F + n * F) });

guide.widgets.roofline = (element) => {
  const chips = JSON.parse(element.querySelector("script").textContent);
  const controls = document.createElement("div");
  controls.className = "controls";
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  const label = document.createElement("label");
  const choice = document.createElement("select");
  for (const name of Object.keys(chips)) choice.add(new Option(name, name));
  label.append("chip ", choice);
  controls.append(label);
  choice.addEventListener("input", draw);
  const range = (...options) => guide.range(controls, ...options, draw);
  const tokens = range("tokens", 0, 15, 8), rows = range("D", 7, 14, 11), columns = range("F", 7, 15, 13);
  const picture = element.querySelector(".scroll");
  element.prepend(controls);
  element.append(report);

  const time = (s) => s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} µs`;

  function draw() {
    const chip = chips[choice.value], [n, D, F] = [tokens, rows, columns].map((x) => 2 ** Number(x.value));
    const { flops, bytes } = guide.product(n, D, F);
    const seconds = [["operations", flops / chip.flops, "c0"], ["memory", bytes / chip.bandwidth, "c1"]];
    const most = Math.max(...seconds.map(([, s]) => s)), parts = [];
    seconds.forEach(([name, s, kind], i) => {
      const y = 6 + 30 * i, width = Math.max(1, 300 * s / most);
      parts.push(`<text x="84" y="${y + 15}" text-anchor="end" class="ink">${name}</text>`);
      parts.push(`<rect x="92" y="${y}" width="${width}" height="22" rx="2" class="${kind}"/>`);
      parts.push(`<text x="${98 + width}" y="${y + 15}" class="ink">${time(s)}</text>`);
    });
    picture.innerHTML = `<svg viewBox="0 0 500 70" width="500" class="drawing" role="img"><title>Times of a product</title>${parts.join("")}</svg>`;
    const bound = seconds[0][1] >= seconds[1][1] ? "operations" : "memory";
    report.textContent = `${n} tokens, ${D} x ${F}: ${(flops / bytes).toPrecision(3)} operations for a byte, and ${choice.value} can do ` +
      `${(chip.flops / chip.bandwidth).toPrecision(3)}. Bound by ${bound}.`;
  }
  draw();
};
