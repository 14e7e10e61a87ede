"use strict";

/* Bytes of a cache in bfloat16: numbers of a token and layer, layers, tokens. */
guide.cacheBytes = (values, layers, tokens) => 2 * values * layers * tokens;

guide.widgets.cache = (element) => {
  const models = JSON.parse(element.querySelector("script").textContent);
  const { controls, report, picture } = guide.frame(element);
  const choice = guide.choice(controls, "model", Object.keys(models), draw);
  const length = guide.range(controls, "tokens", 8, 17, 12, draw);

  const text = (bytes) => {
    const gib = bytes / 2 ** 30;
    return gib >= 1 ? `${Number(gib.toPrecision(3))} GiB` : `${Number((1024 * gib).toPrecision(3))} MiB`;
  };

  function draw() {
    const model = models[choice.value], tokens = 2 ** Number(length.value);
    const sizes = [model.cached, model.plain].map((values) => guide.cacheBytes(values, model.layers, tokens));
    const row = (name, i, kind) => [name, sizes[i] / sizes[1], text(sizes[i]), kind];
    picture.innerHTML = guide.bars("Bytes of a cache", [row("this model", 0, "c0"), row("plain", 1, "idle")]);
    report.textContent = `${choice.value}, ${tokens.toLocaleString("en")} tokens, ${model.layers} layers: ${model.cached.toLocaleString("en")} numbers of a token ` +
      `and layer, and ${model.plain.toLocaleString("en")} with a key and a value for each query head.`;
  }
  draw();
};
