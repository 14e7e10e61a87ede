"use strict";

/* Which slice of a weight each device holds. The layouts come from Python, in the page. */
guide.widgets.mesh = (element) => {
  const data = JSON.parse(element.querySelector("script").textContent);
  const controls = document.createElement("div");
  controls.className = "controls";
  const label = document.createElement("label");
  const select = document.createElement("select");
  for (const name of Object.keys(data.weights)) select.add(new Option(name, name));
  label.append("weight ", select);
  controls.append(label);
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  element.prepend(controls);
  element.append(report);
  const picture = element.querySelector(".scroll");
  let chosen = 0;

  /* The positions in each dimension that is divided. */
  const lines = ({ dims, shape }, slice) => {
    const divided = slice.map(([first, end], i) => [dims[i], first, end - 1, shape[i]])
      .filter(([, first, last, size]) => last - first + 1 < size)
      .map(([dim, first, last]) => last > first ? `${dim} ${first} to ${last}` : `${dim} ${first}`);
    return divided.length ? divided : ["all of it"];
  };
  const text = (slice) => slice.map(([first, end], i) =>
    end - first === data.weights[select.value].shape[i] ? "all" : `${first}–${end - 1}`).join(" x ");

  function draw() {
    const weight = data.weights[select.value], kinds = [], parts = [];
    weight.slices.forEach((slice, device) => {
      const key = JSON.stringify(slice);
      if (!kinds.includes(key)) kinds.push(key);
      const [fsdp, pipeline, tensor] = data.devices[device];
      const x = 10 + 290 * fsdp + 140 * tensor, y = 26 + 96 * pipeline;
      parts.push(`<g data-device="${device}" style="cursor: pointer"><rect x="${x}" y="${y}" width="134" height="86" rx="4" class="c${kinds.indexOf(key)}"/>`);
      if (device === chosen) parts.push(`<rect x="${x}" y="${y}" width="134" height="86" rx="4" class="now"/>`);
      const rows = [`device ${device}: (${fsdp}, ${pipeline}, ${tensor})`, ...lines(weight, slice)];
      rows.forEach((row, i) => parts.push(`<text x="${x + 67}" y="${y + 20 + 20 * i}" text-anchor="middle" class="on">${row}</text>`));
      parts.push("</g>");
    });
    for (let fsdp = 0; fsdp < 2; fsdp++) {
      parts.push(`<text x="${10 + 290 * fsdp + 137}" y="16" text-anchor="middle" class="ink">fsdp rank ${fsdp}</text>`);
    }
    picture.innerHTML = `<svg viewBox="0 0 590 224" width="590" class="drawing" role="img"><title>Slices of ${select.value}</title>${parts.join("")}</svg>`;
    const same = weight.slices.filter((slice) => JSON.stringify(slice) === JSON.stringify(weight.slices[chosen])).length;
    report.textContent = `${select.value} has the shape ${weight.shape.join(" x ")} (${weight.dims.join(" x ")}) and the layout ${weight.layout}. ` +
      `Device ${chosen} holds ${text(weight.slices[chosen])}: 1 of ${kinds.length} different slices, which ${same} ` +
      `${same === 1 ? "device holds" : "devices hold"}.`;
    for (const group of picture.querySelectorAll("g")) {
      group.addEventListener("click", () => { chosen = Number(group.dataset.device); draw(); });
    }
  }
  select.addEventListener("change", draw);
  draw();
};
