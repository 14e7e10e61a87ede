"use strict";

/* dataset.permute in JavaScript. The keys of the rounds come from Python, in the page. */
guide.permutation = (size, keyTexts) => {
  const WORD = (1n << 64n) - 1n, keys = keyTexts.map(BigInt);
  const mix = (x) => {
    x = ((x ^ (x >> 30n)) * 0xBF58476D1CE4E5B9n) & WORD;
    x = ((x ^ (x >> 27n)) * 0x94D049BB133111EBn) & WORD;
    return x ^ (x >> 31n);
  };
  const bitLength = size > 1 ? (size - 1).toString(2).length : 0;
  const bits = BigInt(Math.max(1, Math.ceil(bitLength / 2))), mask = (1n << bits) - 1n;
  const network = (value) => {
    let left = value >> bits, right = value & mask;
    for (const key of keys) [left, right] = [right, left ^ (mix(right ^ key) & mask)];
    return (left << bits) | right;
  };
  return Array.from({ length: size }, (_, i) => {
    let value = network(BigInt(i));
    while (value >= BigInt(size)) value = network(value);
    return Number(value);
  });
};

guide.widgets.permutation = (element) => {
  guide.permutationKeys = JSON.parse(element.querySelector("script").textContent);
  const { controls, report, picture } = guide.frame(element);
  const range = (...options) => guide.range(controls, ...options, draw);
  const size = range("windows", 2, 64, 24), seed = range("seed", 0, 3, 0), epoch = range("epoch", 0, 3, 0);

  function draw() {
    const n = Number(size.value), order = guide.permutation(n, guide.permutationKeys[`${seed.value} ${epoch.value}`]);
    const cell = Math.max(6, Math.floor(480 / n)), parts = [];
    order.forEach((window, position) => {
      const height = 4 + 80 * (window + 1) / n;
      parts.push(`<rect x="${10 + cell * position}" y="${94 - height}" width="${cell - 1}" height="${height}" rx="1" class="c${epoch.value}"/>`);
    });
    picture.innerHTML = `<svg viewBox="0 0 ${20 + cell * n} 100" width="${20 + cell * n}" class="drawing" role="img">` +
      `<title>Order of ${n} windows</title>${parts.join("")}</svg>`;
    report.textContent = `${n} windows, seed ${seed.value}, epoch ${epoch.value}: ${order.slice(0, 16).join(", ")}${n > 16 ? ", .." : ""}`;
  }
  draw();
};
