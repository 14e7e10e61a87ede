"use strict";

/* schedule.py in JavaScript. guide/browser.py compares the two for all small schedules. */
class Schedule {
  constructor(pipeline, virtual, microbatches) {
    Object.assign(this, { pipeline, virtual, microbatches });
    this.stages = pipeline * virtual;
    this.tasksPerRank = microbatches * virtual;
    this.ticks = this.tasksPerRank + this.stages + pipeline - 2;
  }

  /* The first tick, end tick, and directions of each phase. */
  get phases() {
    const steady = this.stages - 1, cooldown = this.tasksPerRank + this.pipeline - 1;
    return [[0, steady, true, false], [steady, cooldown, true, true], [cooldown, this.ticks, false, true]]
      .filter(([first, end]) => first < end);
  }

  forwardTask(number) {
    const group = Math.floor(number / this.stages);
    const chunk = Math.floor((number % this.stages) / this.pipeline);
    return [chunk, group * this.pipeline + number % this.pipeline];
  }

  /* [direction, chunk, microbatch] of each task of a rank in a tick. */
  tasksAt(tick, rank) {
    const tasks = [], isTask = (k) => 0 <= k && k < this.tasksPerRank;
    const forward = tick - rank;
    const backward = tick - (this.stages - 1) - (this.pipeline - 1 - rank);
    if (isTask(forward)) tasks.push(["fwd", ...this.forwardTask(forward)]);
    if (isTask(backward)) {
      const [chunk, microbatch] = this.forwardTask(backward);
      tasks.push(["bwd", this.virtual - 1 - chunk, microbatch]);
    }
    return tasks;
  }

  /* [idle slots, slots] of a rank. */
  get bubble() {
    let slots = 0;
    for (const [first, end, forward, backward] of this.phases) slots += (end - first) * (forward + backward);
    return [slots - 2 * this.tasksPerRank, slots];
  }
}

guide.Schedule = Schedule;

guide.widgets.schedule = (element) => {
  const CELL = 22, LEFT = 60, ROW = 2 * CELL + 6;
  const controls = document.createElement("div");
  controls.className = "controls";
  const inputs = {};
  const add = (name, label, min, max, value) => {
    const box = document.createElement("label");
    box.append(label + " ");
    const input = Object.assign(document.createElement("input"), { type: "range", min, max, value });
    const shown = document.createElement("output");
    input.addEventListener("input", draw);
    box.append(input, " ", shown);
    controls.append(box);
    inputs[name] = { input, shown };
  };
  const picture = element.querySelector(".scroll");
  const report = document.createElement("p");
  report.setAttribute("aria-live", "polite");
  add("pipeline", "ranks", 1, 8, 4);
  add("virtual", "chunks a rank", 1, 4, 2);
  add("microbatches", "microbatches", 1, 32, 8);
  add("tick", "tick", 0, 25, 12);
  element.prepend(controls);
  element.append(report);

  function draw() {
    const value = (name) => Number(inputs[name].input.value);
    const pipeline = value("pipeline"), virtual = value("virtual");
    let microbatches = value("microbatches");
    if (virtual > 1) microbatches = Math.min(32, Math.ceil(microbatches / pipeline) * pipeline);
    if (virtual > 1 && microbatches % pipeline) microbatches -= microbatches % pipeline;
    const schedule = new Schedule(pipeline, virtual, microbatches);
    inputs.tick.input.max = schedule.ticks - 1;
    const now = Math.min(value("tick"), schedule.ticks - 1);
    for (const [name, shown] of Object.entries({ pipeline, virtual, microbatches, tick: now })) {
      inputs[name].shown.textContent = shown;
    }
    const parts = [];
    const cell = (x, y, kind, text) => {
      parts.push(`<rect x="${x + 0.5}" y="${y + 0.5}" width="${CELL - 1}" height="${CELL - 1}" rx="2" class="${kind}"/>`);
      if (text !== undefined) {
        parts.push(`<text x="${x + CELL / 2}" y="${y + CELL / 2 + 4.5}" text-anchor="middle" class="on">${text}</text>`);
      }
    };
    for (let rank = 0; rank < pipeline; rank++) {
      const top = rank * ROW;
      parts.push(`<text x="${LEFT - 8}" y="${top + CELL + 4.5}" text-anchor="end" class="ink">rank ${rank}</text>`);
      for (let tick = 0; tick < schedule.ticks; tick++) {
        const phase = schedule.phases.find(([first, end]) => first <= tick && tick < end);
        const tasks = schedule.tasksAt(tick, rank);
        ["fwd", "bwd"].forEach((way, i) => {
          const task = tasks.find((one) => one[0] === way), x = LEFT + tick * CELL, y = top + i * CELL;
          if (task) cell(x, y, way + Math.min(task[1], 3), task[2]);
          else if (phase[2 + i]) cell(x, y, "idle");
        });
      }
    }
    const height = pipeline * ROW, width = LEFT + schedule.ticks * CELL + 6;
    for (let tick = 0; tick < schedule.ticks; tick++) {
      parts.push(`<text x="${LEFT + (tick + 0.5) * CELL}" y="${pipeline * ROW + 8}" text-anchor="middle" class="faint">${tick}</text>`);
    }
    parts.push(`<rect x="${LEFT + now * CELL}" y="0" width="${CELL}" height="${height - 6}" class="now"/>`);
    picture.innerHTML = `<svg viewBox="0 0 ${width} ${height + 16}" width="${width}" class="drawing" role="img">` +
      `<title>Schedule of ${pipeline} ranks</title>${parts.join("")}</svg>`;
    const [idle, slots] = schedule.bubble;
    const busy = [];
    for (let rank = 0; rank < pipeline; rank++) {
      for (const [way, chunk, microbatch] of schedule.tasksAt(now, rank)) {
        busy.push(`rank ${rank} ${way === "fwd" ? "forward" : "backward"} of microbatch ${microbatch}, chunk ${chunk}`);
      }
    }
    report.textContent = `${schedule.ticks} ticks, bubble ${idle} of ${slots} slots ` +
      `(${(100 * idle / slots).toFixed(1)} %). Tick ${now}: ${busy.join("; ") || "no task"}.`;
  }
  draw();
};
