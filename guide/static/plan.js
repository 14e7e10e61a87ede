"use strict";

guide.widgets.plan = (element) => {
  const plans = JSON.parse(element.querySelector("script").textContent);
  const controls = document.createElement("div");
  controls.className = "controls";
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  const label = document.createElement("label");
  const choice = document.createElement("select");
  for (const mesh of Object.keys(plans)) choice.add(new Option(`(${mesh})`, mesh));
  if (plans["8, 2, 2"]) choice.value = "8, 2, 2";
  label.append("mesh (fsdp, pipeline, tensor) ", choice);
  controls.append(label);
  choice.addEventListener("input", draw);
  const picture = element.querySelector(".scroll");
  element.prepend(controls);
  element.append(report);
  const most = Math.max(...Object.values(plans).flatMap((plan) => [plan.compute, plan.memory, plan.links]));

  function draw() {
    const plan = plans[choice.value], parts = [];
    [["compute", "c0"], ["memory", "c1"], ["links", "c2"]].forEach(([name, kind], i) => {
      const y = 6 + 30 * i, width = Math.max(1, 300 * plan[name] / most);
      parts.push(`<text x="84" y="${y + 15}" text-anchor="end" class="ink">${name}</text>`);
      parts.push(`<rect x="92" y="${y}" width="${width}" height="22" rx="2" class="${kind}"/>`);
      parts.push(`<text x="${98 + width}" y="${y + 15}" class="ink">${(1e3 * plan[name]).toFixed(0)} ms</text>`);
    });
    picture.innerHTML = `<svg viewBox="0 0 500 100" width="500" class="drawing" role="img"><title>Busy times of a step</title>${parts.join("")}</svg>`;
    report.textContent = `Mesh (${choice.value}): ${plan.gib.toFixed(2)} GiB, ${(100 * plan.bubble).toFixed(0)} % of pipeline slots idle, ` +
      `${(1e3 * plan.serial).toFixed(0)} ms for a step in which nothing overlaps.`;
  }
  draw();
};
