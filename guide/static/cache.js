"use strict";

/* Bytes of a cache in bfloat16: numbers of a token and layer, layers, tokens. */
guide.cacheBytes = (values, layers, tokens) => 2 * values * layers * tokens;

guide.widgets.cache = (element) => {
  const models = JSON.parse(element.querySelector("script").textContent);
  const controls = document.createElement("div");
  controls.className = "controls";
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  const label = document.createElement("label");
  const choice = document.createElement("select");
  for (const name of Object.keys(models)) choice.add(new Option(name, name));
  label.append("model ", choice);
  controls.append(label);
  choice.addEventListener("input", draw);
  const length = guide.range(controls, "tokens", 8, 17, 12, draw);
  const picture = element.querySelector(".scroll");
  element.prepend(controls);
  element.append(report);

  const text = (bytes) => {
    const gib = bytes / 2 ** 30;
    return gib >= 1 ? `${Number(gib.toPrecision(3))} GiB` : `${Number((1024 * gib).toPrecision(3))} MiB`;
  };

  function draw() {
    const model = models[choice.value], tokens = 2 ** Number(length.value);
    const most = guide.cacheBytes(model.plain, model.layers, tokens), W = 300, parts = [];
    [["this model", model.cached, "c0"], ["plain", model.plain, "idle"]].forEach(([name, values, kind], i) => {
      const bytes = guide.cacheBytes(values, model.layers, tokens), y = 6 + 30 * i;
      parts.push(`<text x="84" y="${y + 15}" text-anchor="end" class="ink">${name}</text>`);
      parts.push(`<rect x="92" y="${y}" width="${Math.max(1, W * bytes / most)}" height="22" rx="2" class="${kind}"/>`);
      parts.push(`<text x="${98 + W * bytes / most}" y="${y + 15}" class="ink">${text(bytes)}</text>`);
    });
    picture.innerHTML = `<svg viewBox="0 0 500 70" width="500" class="drawing" role="img"><title>Bytes of a cache</title>${parts.join("")}</svg>`;
    report.textContent = `${choice.value}, ${tokens.toLocaleString("en")} tokens, ${model.layers} layers: ${model.cached.toLocaleString("en")} numbers of a token ` +
      `and layer, and ${model.plain.toLocaleString("en")} with a key and a value for each query head.`;
  }
  draw();
};
