"use strict";

/* The slot of each choice of one sequence, as model.assign_slots numbers them; -1 if it is dropped.
   choices: one list of experts for each token. */
guide.assignSlots = (choices, experts, capacity) => {
  const count = new Array(experts).fill(0);
  return choices.map((one) => one.map((e) => {
    const place = count[e]++;
    return place < capacity ? e * capacity + place : -1;
  }));
};

/* The number of tiles, each of one expert, that hold all choices. */
guide.tiles = (choices, experts, tile) => {
  const count = new Array(experts).fill(0);
  for (const e of choices.flat()) count[e]++;
  return count.reduce((sum, n) => sum + Math.ceil(n / tile), 0);
};

guide.widgets.dispatch = (element) => {
  const TOKENS = 24, EXPERTS = 4, TILE = 4;
  const { controls, report, picture } = guide.frame(element);
  const uneven = guide.range(controls, "uneven", 0, 10, 4, draw);
  const factor = guide.range(controls, "capacity factor, tenths", 10, 40, 13, draw);

  function draw() {
    const weights = Array.from({ length: EXPERTS }, (_, e) => Math.exp(-e * Number(uneven.value) / 5));
    const sum = weights.reduce((a, b) => a + b), choices = [];
    for (let token = 0; token < TOKENS; token++) {
      let at = ((token * 0.618034 + 0.1) % 1) * sum, e = 0;  /* an even sequence, and no chance */
      while (e < EXPERTS - 1 && at >= weights[e]) at -= weights[e++];
      choices.push([e]);
    }
    const capacity = Math.min(TOKENS, Math.ceil(Number(factor.value) / 10 * TOKENS / EXPERTS));
    const slots = guide.assignSlots(choices, EXPERTS, capacity).flat(), parts = [];
    const box = (x, y, kind, text) => {
      parts.push(`<rect x="${x}" y="${y}" width="20" height="18" rx="2" class="${kind}"/>`);
      if (text !== undefined) parts.push(`<text x="${x + 10}" y="${y + 13}" text-anchor="middle" class="${kind === "frame" ? "faint" : "on"}">${text}</text>`);
    };
    let low = 0;
    for (let e = 0; e < EXPERTS; e++) {
      const own = choices.map(([one], token) => [one, token]).filter(([one]) => one === e).map(([, token]) => token);
      const x = 100 + 112 * e, cell = (i, top) => [x + 22 * (i % 4), top + 20 * Math.floor(i / 4)];
      parts.push(`<text x="${x + 44}" y="12" text-anchor="middle" class="ink">expert ${e}</text>`);
      for (let i = 0; i < Math.max(own.length, capacity); i++) {
        const kept = i < own.length && slots[own[i]] >= 0;
        box(...cell(i, 20), kept ? `c${e}` : i < own.length ? "frame" : "idle", own[i]);
      }
      for (let i = 0; i < Math.ceil(own.length / TILE) * TILE; i++) box(...cell(i, 160), i < own.length ? `c${e}` : "idle", own[i]);
      low = Math.max(low, own.length);
    }
    parts.push(`<text x="92" y="34" text-anchor="end" class="ink">capacity ${capacity}</text><text x="92" y="174" text-anchor="end" class="ink">tiles of ${TILE}</text>`);
    picture.innerHTML = `<svg viewBox="0 0 560 290" width="560" class="drawing" role="img"><title>Choices with a capacity, and in tiles</title>${parts.join("")}</svg>`;
    const dropped = slots.filter((slot) => slot < 0).length, tiles = guide.tiles(choices, EXPERTS, TILE);
    report.textContent = `Capacity: ${EXPERTS * capacity} rows are computed, and ${dropped} of ${TOKENS} choices dropped. ` +
      `Tiles: ${tiles * TILE} rows, and none dropped. Numbers are tokens; dashed ones are dropped, gray rows are empty.`;
  }
  draw();
};
