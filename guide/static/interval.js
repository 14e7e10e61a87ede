"use strict";

/* The share of time that saves and failures cost, against the interval of saves. */
guide.lostShare = (interval, save, failure) => save / interval + interval / (2 * failure);

guide.widgets.interval = (element) => {
  const { controls, report, picture } = guide.frame(element);
  const range = (...options) => guide.range(controls, ...options, draw);
  const save = range("save, s", 1, 60, 5), hours = range("failure every, hours", 1, 72, 6);

  function draw() {
    const s = Number(save.value), failure = 3600 * Number(hours.value);
    const best = Math.sqrt(2 * s * failure), W = 520, H = 220, LEFT = 50, low = 30, high = 14400;
    const at = (interval, share) => [
      LEFT + (Math.log(interval) - Math.log(low)) / (Math.log(high) - Math.log(low)) * (W - LEFT - 10),
      10 + (1 - Math.min(share, 0.2) / 0.2) * (H - 40),
    ];
    const points = Array.from({ length: 80 }, (_, i) => low * (high / low) ** (i / 79));
    const path = points.map((x) => at(x, guide.lostShare(x, s, failure)).map((v) => v.toFixed(1)).join(",")).join(" ");
    const parts = [0, 0.05, 0.1, 0.15, 0.2].map((share) => {
      const [, y] = at(low, share);
      return `<polyline points="${LEFT},${y} ${W - 10},${y}" class="grid"/><text x="${LEFT - 6}" y="${y + 4}" text-anchor="end" class="faint">${100 * share} %</text>`;
    });
    for (const [x, name] of [[60, "1 min"], [600, "10 min"], [3600, "1 h"]]) {
      parts.push(`<text x="${at(x, 0)[0]}" y="${H - 12}" text-anchor="middle" class="faint">${name}</text>`);
    }
    const [x, y] = at(best, guide.lostShare(best, s, failure));
    parts.push(`<polyline points="${path}" class="line s0"/><circle cx="${x}" cy="${y}" r="5" class="c1"/>`);
    picture.innerHTML = `<svg viewBox="0 0 ${W} ${H}" width="${W}" class="drawing" role="img"><title>Share of time lost</title>${parts.join("")}</svg>`;
    report.textContent = `A save of ${s} s and a failure every ${hours.value} h: save every ${Math.round(best)} s, ` +
      `and lose ${(100 * guide.lostShare(best, s, failure)).toFixed(1)} %.`;
  }
  draw();
};
