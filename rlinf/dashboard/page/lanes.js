// Lanes: what each actor did when. The last minute of a live run, and steps early, in the middle and at the end of one.

const THIN = new Set(["waiting", "side by side"]), STRIPED = new Set(["loading", "parking"]);
const rowHeight = (count) => (count <= 12 ? 22 : count <= 24 ? 16 : 11);

/** Draws stretches into a canvas that is `width` wide, CSS pixels; `from` and `to` in the lanes' own seconds. */
function paintLanes(canvas, lanes, { from, to, width, row }) {
  const scale = Math.min(2, devicePixelRatio || 1), height = Math.max(1, lanes.length * row);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const draw = canvas.getContext("2d"), per = width / (to - from), gap = row > 14 ? 4 : 2;
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  draw.fillStyle = colour("--lane");
  lanes.forEach((_, i) => draw.fillRect(0, i * row + gap / 2, width, row - gap));
  lanes.forEach(({ stretches }, i) => {
    for (const [activity, start, end] of stretches) {
      if (end < from || start > to) continue;
      const x = Math.max(0, (start - from) * per), wide = Math.max(0.7, Math.min(width, (end - from) * per) - x);
      const top = i * row + gap / 2, high = row - gap;
      draw.fillStyle = colour(hue(activity));
      if (THIN.has(activity)) draw.fillRect(x, top + high * 0.42, wide, Math.max(1, high * 0.16));
      else if (STRIPED.has(activity)) draw.fillRect(x, top + high * 0.25, wide, high * 0.5);
      else draw.fillRect(x, top, wide, high);
    }
  });
}

/** What was done at a place of a lane: the shortest stretch that holds it. */
function stretchAt(lane, time, within) {
  const here = lane.stretches.filter(([, start, end]) => start - within <= time && time <= end + within);
  return here.sort((one, other) => THIN.has(one[0]) - THIN.has(other[0]) || one[2] - one[1] - (other[2] - other[1]))[0];
}

function tellLanes(canvas, view) {
  canvas.addEventListener("pointermove", (event) => {
    const { lanes, from, to, width, row, title } = view();
    const lane = lanes[Math.floor(event.offsetY / row)], time = from + (event.offsetX / width) * (to - from);
    const found = lane && stretchAt(lane, time, ((to - from) / width) * 2);
    if (found) tip.show(`${lane.actor}: ${found[0]}, ${lasting(found[2] - found[1])}${title(found[1])}`, event.clientX, event.clientY);
    else tip.hide();
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
}

const namesOf = (lanes, row) => lanes.map(({ actor, host }) => el("li", { style: { height: `${row}px`, "line-height": `${row}px`, "font-size": `${Math.min(12, row)}px` }, title: host === "" ? actor : `${actor}, host ${host}` }, actor));

const activitiesOf = (lanes) => {
  const found = new Set(lanes.flatMap((lane) => lane.stretches.map(([activity]) => activity)));
  return [...ACTIVITIES.filter((name) => found.has(name)), ...[...found].filter((name) => !ACTIVITIES.includes(name)).sort()];
};

// The last minute ------------------------------------------------------------------------------------------------------

const DELAY = 1;

function minuteSection(place) {
  const names = el("ol", { class: "names", "aria-hidden": "true" }), canvas = el("canvas", { role: "img" }), clip = el("div", { class: "clip" }, canvas);
  const scale = el("div", { class: "scale", "aria-hidden": "true" }, [60, 45, 30, 15, 0].map((ago) => el("span", {}, ago ? `${ago} s ago` : "now")));
  const key = el("div");
  place.append(el("div", { class: "card pad" }, el("div", { class: "lanes" }, names, el("div", {}, clip, scale)), key));
  let seen = true, shown = "", legendOf = "", moving = null;
  const view = { lanes: [], from: 0, to: 1, width: 1, row: 12, title: (start) => `, ${lasting(Math.max(0, view.to - start))} ago` };
  whenSeen(clip, (now) => { seen = now; });
  tellLanes(canvas, () => view);

  return (run) => {
    if (!seen) return;
    const lanes = [...run.lanes.values()].sort((one, other) => one.host - other.host || one.actor.localeCompare(other.actor, "en", { numeric: true }));
    const row = rowHeight(lanes.length), wide = clip.clientWidth;
    if (!wide) return;
    const list = `${row} ${lanes.map((lane) => lane.actor).join(" ")}`;
    if (list !== shown) {
      shown = list;
      names.replaceChildren(...namesOf(lanes, row));
      clip.style.height = `${lanes.length * row}px`;
    }
    const told = activitiesOf(lanes);
    if (told.join() !== legendOf) {
      legendOf = told.join();
      key.replaceChildren(legend(told));
    }
    // The canvas is a second wider than what is seen of it, and slides by that second until the next one comes.
    const per = wide / MINUTE, slides = !still.matches;
    Object.assign(view, { lanes, row, width: wide + per * DELAY, to: run.now, from: run.now - MINUTE - DELAY });
    paintLanes(canvas, lanes, view);
    moving?.cancel();
    moving = null;
    if (slides) moving = canvas.animate([{ transform: "translateX(0)" }, { transform: `translateX(${-per * DELAY}px)` }], { duration: 1000 * DELAY, fill: "forwards" });
    else canvas.style.transform = `translateX(${-per * DELAY}px)`;
    const busy = lanes.filter((lane) => lane.stretches.some(([activity, , end]) => !THIN.has(activity) && end > run.now - 1)).length;
    canvas.setAttribute("aria-label", `what ${many(lanes.length, "role")} did in the last minute; ${busy} worked in the last second`);
  };
}

// Steps of a trace -----------------------------------------------------------------------------------------------------

const MOST_LANES = 64;

function stepsSection(place) {
  let drawn = null;
  const redraw = () => drawn && frames.draw(drawn);
  addEventListener("resize", redraw);
  dark.addEventListener("change", redraw);
  return ({ state: { lanes: steps } }) => {
    const longest = Math.max(...steps.map((step) => step.seconds)), titles = { 1: [""], 2: ["early", "late"], 3: ["early", "in the middle", "at the end"] }[steps.length] ?? [];
    const panels = steps.map((step, i) => {
      const lanes = step.lanes.slice(0, MOST_LANES), row = rowHeight(lanes.length);
      if (has(step.overlap)) lanes.push({ host: "", actor: "side by side", stretches: step.overlap.map(([start, end]) => ["side by side", start, end]) });
      const canvas = el("canvas", { role: "img", "aria-label": `step ${step.step}: ${sums(step.timing)}` });
      const body = el("div", { class: "track" }, canvas), cut = step.lanes.length - Math.min(step.lanes.length, MOST_LANES);
      const view = { lanes, from: 0, to: longest, width: 1, row, title: (start) => `, ${lasting(start)} after the step began` };
      tellLanes(canvas, () => view);
      const panel = el("div", { class: "panel" }, el("h3", {}, `Step ${step.step}`, el("small", {}, ` ${titles[i] ?? ""}`)), el("p", { class: "soft small" }, `${lasting(step.seconds)}: ${sums(step.timing)}`),
        el("div", { class: "lanes" }, el("ol", { class: "names", "aria-hidden": "true" }, namesOf(lanes, row)), el("div", {}, body,
          el("div", { class: "scale", "aria-hidden": "true" }, el("span", {}, "0 s"), el("span", {}, lasting(longest))))), cut ? el("p", { class: "soft small" }, `and ${cut} more`) : null);
      return { panel, paint: () => { view.width = body.clientWidth; if (view.width) paintLanes(canvas, lanes, view); } };
    });
    place.replaceChildren(el("div", { class: "card pad panels" }, panels.map(({ panel }) => panel)), legend(activitiesOf(steps.flatMap((step) => step.lanes))));
    drawn = () => panels.forEach(({ paint }) => paint());
    drawn();
  };
}

function sums(timing = {}) {
  const parts = [...ACTIVITIES, "switching"].map((name) => [name, timing[`timing/${name}`]]).filter(([, seconds]) => seconds >= 0.0005);
  return parts.sort((one, other) => other[1] - one[1]).map(([name, seconds]) => `${name} ${lasting(seconds)}`).join(", ") || "nothing traced";
}
