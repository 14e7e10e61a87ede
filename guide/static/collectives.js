"use strict";

/* Bytes that a rank sends on a ring, as planning/results.py counts them. */
guide.sentBytes = (kind, resultBytes, ranks) => {
  if (kind === "collective-permute") return resultBytes;
  const whole = resultBytes * (kind === "reduce-scatter" ? ranks : 1);
  return whole * (ranks - 1) / ranks * (kind === "all-reduce" ? 2 : 1);
};

guide.widgets.collectives = (element) => {
  const NAMES = {
    "all-gather": "lax.all_gather", "reduce-scatter": "lax.psum_scatter", "all-reduce": "lax.psum",
    "all-to-all": "lax.all_to_all", "collective-permute": "lax.ppermute",
  };
  const { controls, report, picture } = guide.frame(element);
  const box = (text, input) => {
    const label = document.createElement("label");
    label.append(text + " ", input);
    controls.append(label);
    input.addEventListener("input", draw);
    return input;
  };
  const kind = box("collective", document.createElement("select"));
  for (const [name, call] of Object.entries(NAMES)) kind.add(new Option(`${name} (${call})`, name));
  const range = (min, max, value) => Object.assign(document.createElement("input"), { type: "range", min, max, value });
  const ranks = box("ranks", range(2, 8, 4));
  const size = box("complete array", range(0, 10, 4));

  function draw() {
    const n = Number(ranks.value), mib = 2 ** Number(size.value), name = kind.value;
    const wide = name === "collective-permute" ? 1 : n, SIZE = 22, GAP = 6;
    const letter = (i) => "abcdefgh"[i];
    /* What rank r holds of part i: [before, after], each [text, color] or null. */
    const cells = {
      "all-gather": (r, i) => [i === r ? [letter(i), i] : null, [letter(i), i]],
      "reduce-scatter": (r, i) => [[letter(i) + r, i], i === r ? ["Σ" + letter(i), i] : null],
      "all-reduce": (r, i) => [[letter(i) + r, i], ["Σ" + letter(i), i]],
      "all-to-all": (r, i) => [[letter(r) + i, r], [letter(i) + r, i]],
      "collective-permute": (r) => [[letter(r), r], [letter((r + n - 1) % n), (r + n - 1) % n]],
    }[name];
    const parts = [], width = n * (SIZE + GAP), right = width + 70;
    for (let r = 0; r < n; r++) {
      for (const [side, left] of [[0, 0], [1, right]]) {
        const x = left + r * (SIZE + GAP);
        parts.push(`<text x="${x + SIZE / 2}" y="14" text-anchor="middle" class="faint">${r}</text>`);
        for (let i = 0; i < wide; i++) {
          const cell = cells(r, i)[side], y = 22 + i * SIZE;
          parts.push(`<rect x="${x}" y="${y}" width="${SIZE - 1}" height="${SIZE - 1}" rx="2" class="${cell ? "c" + cell[1] : "idle"}"/>`);
          if (cell) parts.push(`<text x="${x + SIZE / 2}" y="${y + 15}" text-anchor="middle" class="on">${cell[0]}</text>`);
        }
      }
    }
    const middle = 22 + wide * SIZE / 2;
    parts.push(`<polyline points="${width + 8},${middle} ${right - 14},${middle}" class="line"/>`);
    parts.push(`<polygon points="${right - 8},${middle} ${right - 16},${middle - 4} ${right - 16},${middle + 4}" class="tip"/>`);
    picture.innerHTML = `<svg viewBox="0 0 ${right + width} ${30 + wide * SIZE}" width="${right + width}" class="drawing" role="img">` +
      `<title>${name} over ${n} ranks</title>${parts.join("")}</svg>`;
    const result = name === "reduce-scatter" ? mib / n : mib;
    const sent = guide.sentBytes(name, result, n);
    report.textContent = `${n} ranks, a complete array of ${mib} MiB: each rank ends with ${result.toPrecision(4) / 1} MiB, ` +
      `and sends ${sent.toPrecision(4) / 1} MiB.`;
  }
  draw();
};
