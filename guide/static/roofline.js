"use strict";

/* Operations and bytes of a bfloat16 product of n tokens with a matrix of D x F. */
guide.product = (n, D, F) => ({ flops: 2 * n * D * F, bytes: 2 * (n * D + D * F + n * F) });

guide.widgets.roofline = (element) => {
  const chips = JSON.parse(element.querySelector("script").textContent);
  const { controls, report, picture } = guide.frame(element);
  const choice = guide.choice(controls, "chip", Object.keys(chips), draw);
  const range = (...options) => guide.range(controls, ...options, draw);
  const tokens = range("tokens", 0, 15, 8), rows = range("D", 7, 14, 11), columns = range("F", 7, 15, 13);

  const time = (s) => s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} µs`;

  function draw() {
    const chip = chips[choice.value], [n, D, F] = [tokens, rows, columns].map((x) => 2 ** Number(x.value));
    const { flops, bytes } = guide.product(n, D, F);
    const seconds = [["operations", flops / chip.flops, "c0"], ["memory", bytes / chip.bandwidth, "c1"]];
    const most = Math.max(...seconds.map(([, s]) => s));
    picture.innerHTML = guide.bars("Times of a product", seconds.map(([name, s, kind]) => [name, s / most, time(s), kind]));
    const bound = seconds[0][1] >= seconds[1][1] ? "operations" : "memory";
    report.textContent = `${n} tokens, ${D} x ${F}: ${(flops / bytes).toPrecision(3)} operations for a byte, and ${choice.value} can do ` +
      `${(chip.flops / chip.bandwidth).toPrecision(3)}. Bound by ${bound}.`;
  }
  draw();
};
