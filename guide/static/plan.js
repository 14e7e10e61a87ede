"use strict";

guide.widgets.plan = (element) => {
  const plans = JSON.parse(element.querySelector("script").textContent);
  const { controls, report, picture } = guide.frame(element);
  const choice = guide.choice(controls, "mesh (fsdp, pipeline, tensor)", Object.keys(plans), draw);
  if (plans["8, 2, 2"]) choice.value = "8, 2, 2";
  const most = Math.max(...Object.values(plans).flatMap((plan) => [plan.compute, plan.memory, plan.links]));

  function draw() {
    const plan = plans[choice.value];
    const row = (name, kind) => [name, plan[name] / most, `${(1e3 * plan[name]).toFixed(0)} ms`, kind];
    picture.innerHTML = guide.bars("Busy times of a step", [row("compute", "c0"), row("memory", "c1"), row("links", "c2")]);
    report.textContent = `Mesh (${choice.value}): ${plan.gib.toFixed(2)} GiB, ${(100 * plan.bubble).toFixed(0)} % of pipeline slots idle, ` +
      `${(1e3 * plan.serial).toFixed(0)} ms for a step in which nothing overlaps.`;
  }
  draw();
};
