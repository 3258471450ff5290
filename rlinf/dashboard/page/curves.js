// Curves of metrics, those of several runs in one chart. All charts follow when one is pointed at.

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20, DOTS = 12;
const axis = { over: chosen.get("axis", "step"), smoothing: Number(chosen.get("smoothing", "0.6")), log: false };
const charts = new Set();
/** Shown even where they are 0 throughout: that is what whoever looks for them has to see. */
const MAIN = new Set(["reward/mean", "evaluation/accuracy", "success_once", "evaluation/success_once", "grad_norm"]);

// A running mean whose first values are not drawn towards zero, as in Adam's moments.
function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const spacing = [1, 2, 5, 10].map((n) => n * power).find((n) => (high - low) / n <= 5);
  const found = [];
  for (let n = Math.ceil(low / spacing); n * spacing <= high + 1e-12 && found.length < 9; n += 1) found.push(n * spacing);
  return found;
}

const along = (run) => ({
  time: run.curves.elapsed, env: run.curves.env_steps ?? run.curves.steps, step: run.curves.steps,
})[axis.over];

const where = (value) => ({
  time: () => clock(value), env: () => `${Math.round(value).toLocaleString("en")} environment steps`,
  step: () => `step ${Math.round(value)}`,
})[axis.over]();

class Chart {
  constructor(metric) {
    this.metric = metric;
    this.curves = [];
    this.seen = false;
    this.at = null;
    this.output = el("output");
    this.svg = svg("svg", { tabindex: 0, role: "img" });
    const grow = el("button", { class: "quiet grow", "aria-label": `enlarge ${metric}`, "aria-pressed": "false", title: "enlarge" }, "⤢");
    this.element = el("figure", { class: "card chart", "data-metric": metric },
      el("figcaption", {}, el("b", { title: metric }, metric), this.output, grow), this.svg);
    grow.addEventListener("click", () => {
      grow.setAttribute("aria-pressed", String(this.element.classList.toggle("large")));
      this.draw();
    });
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX ?? event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => Chart.rest());
    this.svg.addEventListener("blur", () => Chart.rest());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    whenSeen(this.element, (seen) => {
      this.seen = seen;
      if (seen && this.stale) frames.draw(this.drawing);
    });
    this.drawing = () => this.draw();
    this.stale = true;
    charts.add(this);
  }

  static rest() { for (const chart of charts) if (chart.seen) chart.rest(); }
  static all() { for (const chart of charts) chart.changed(); }

  changed() {
    this.stale = true;
    if (this.element.isConnected && (this.seen || this.blank)) frames.draw(this.drawing);
  }

  /** Nothing stands where it is unfolded: whoever prints the page or takes a picture of all of it saw an empty box. */
  get blank() { return !this.width && !this.element.closest("details:not([open])"); }

  draw() {
    const width = Math.round(this.svg.clientWidth), height = this.svg.clientHeight;
    if (!width || !height) return;
    this.stale = false;
    this.width = width;
    this.curves = board.drawn.map((run) => {
      const told = run.curves.metrics[this.metric] ?? [], x = along(run), there = [];
      const values = axis.log ? told.map((value) => (value > 0 ? value : null)) : told;  // a logarithm of the others is none
      values.forEach((value, i) => { if (isNumber(value)) there.push(i); });
      return there.length ? { run, values, x, there, line: smooth(values, there.length > DOTS ? axis.smoothing : 0) } : null;
    }).filter(Boolean);
    this.svg.replaceChildren();
    if (!this.curves.length) { say(this.output, ""); return; }
    const bend = axis.log ? Math.log10 : (value) => value;
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    const raw = this.curves.length === 1 && axis.smoothing > 0;
    for (const { values, line, there, x } of this.curves) {
      for (const i of there) {
        const both = raw ? [values[i], line[i]] : [line[i]];
        for (const value of both) { low = Math.min(low, bend(value)); high = Math.max(high, bend(value)); }
      }
      first = Math.min(first, x[0]);
      last = Math.max(last, x[x.length - 1]);
    }
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const more = Math.abs(low) / 10 || 0.5; low -= more; high += more; }
    const span = last - first;
    this.height = height;
    this.place = (value) => LEFT + (span ? (value - first) / span : 0.5) * (width - LEFT - RIGHT);
    this.value = (at) => first + ((at - LEFT) / (width - LEFT - RIGHT)) * span;
    this.level = (value) => TOP + ((high - bend(value)) / (high - low)) * (height - TOP - BOTTOM);
    const grid = svg("g", { class: "grid" });
    for (const tick of ticks(low, high)) {
      const y = TOP + ((high - tick) / (high - low)) * (height - TOP - BOTTOM);
      grid.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(axis.log ? 10 ** tick : tick)));
    }
    const label = axis.over === "time" ? clock : short;
    if (span) grid.append(svg("text", { x: LEFT, y: height - 4 }, label(first)));
    grid.append(svg("text", { x: span ? width - RIGHT : this.place(last), y: height - 4, "text-anchor": span ? "end" : "middle" }, label(last)));
    this.svg.append(grid);
    for (const curve of this.curves) {
      const series = svg("g", { class: `run${curve.run.number % COLOURS}` });
      if (raw && curve.there.length > DOTS) series.append(svg("path", { class: "raw", d: this.path(curve, curve.values) }));
      series.append(svg("path", { class: "smooth", d: this.path(curve, curve.line) }));
      if (curve.there.length <= DOTS) for (const i of curve.there) series.append(this.dot(curve, i, 3));
      this.svg.append(series);
    }
    this.marks = this.svg.appendChild(svg("g"));
    this.rest();
    const [lead] = this.curves, begin = lead.values[lead.there[0]], end = lead.values[lead.there.at(-1)];
    this.svg.setAttribute("aria-label", `${this.metric}: from ${short(begin)} to ${short(end)}. Arrow keys read values.`);
  }

  dot({ x, line }, i, r) { return svg("circle", { class: "dot", cx: this.place(x[i]), cy: this.level(line[i]), r }); }

  path({ x, there }, values) {
    let text = "";
    for (const i of there) text += `${text ? "L" : "M"}${this.place(x[i]).toFixed(1)} ${this.level(values[i]).toFixed(1)}`;
    return text;
  }

  point(at) {
    if (!this.curves.length) return;
    const wanted = this.value(at);
    const near = this.curves.flatMap(({ x, there }) => x[nearest(x, there, wanted)])
      .reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best));
    for (const chart of charts) if (chart.seen) chart.show(near);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.curves.length) return;
    event.preventDefault();
    const { x, there } = this.curves[0];
    const now = this.at === null ? there.length - 1 : there.indexOf(nearest(x, there, this.at));
    const next = Math.max(0, Math.min(there.length - 1, now + move));
    this.point(this.place(x[there[next]]));
    this.svg.setAttribute("aria-label", `${this.metric}: ${this.output.textContent}`);
  }

  show(at) {
    if (!this.marks || !this.curves.length) return;
    this.at = at;
    this.marks.replaceChildren(svg("line", { class: "cross", x1: this.place(at), x2: this.place(at), y1: TOP, y2: this.height - BOTTOM }));
    const shown = this.curves.map((curve) => [curve, nearest(curve.x, curve.there, at)]);
    for (const [curve, i] of shown) this.marks.append(svg("g", { class: `run${curve.run.number % COLOURS}` }, this.dot(curve, i, 3.5)));
    this.tell(shown, ` at ${where(at)}`);
  }

  rest() {
    this.at = null;
    this.marks?.replaceChildren();
    this.tell(this.curves.map((curve) => [curve, curve.there.at(-1)]), "");
  }

  tell(shown, when) {
    const several = board.drawn.length > 1;
    this.output.replaceChildren(...shown.map(([{ run, values }, i]) =>
      el("span", { class: several ? `told run${run.number % COLOURS}` : null, title: several ? run.name : null }, short(values[i]))), when);
  }
}

/** The index, among those that have a value, whose place is nearest. */
function nearest(x, there, wanted) {
  let low = 0, high = there.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[there[middle]] < wanted) low = middle; else high = middle;
  }
  return Math.abs(x[there[high]] - wanted) < Math.abs(x[there[low]] - wanted) ? there[high] : there[low];
}

/** Names of metrics that have a value in some drawn run, and whether any of it is not 0. */
function metricsThere() {
  const found = new Map();
  for (const run of board.drawn) {
    for (const [name, values] of Object.entries(run.curves.metrics)) {
      if (found.get(name) !== true && values.some(isNumber)) found.set(name, values.some(Boolean));
    }
  }
  return found;
}

function curvesSection(place) {
  const search = el("input", { type: "search", placeholder: "find metrics: kl, timing …", "aria-label": "find metrics" });
  const range = el("input", { type: "range", min: 0, max: 0.97, step: 0.01, value: axis.smoothing, "aria-label": "smoothing" });
  const over = el("select", { "aria-label": "axis" });
  const log = el("input", { type: "checkbox" });
  const groups = el("div", { class: "groups" }), none = el("p", { class: "soft", hidden: true }, "No metric is called so.");
  place.append(el("div", { class: "tools" }, search, el("label", {}, "smoothing ", range), el("label", {}, "over ", over),
    el("label", {}, log, " logarithmic")), groups, none);
  const found = new Map();
  let drawn = "";
  search.addEventListener("input", filter);
  range.addEventListener("input", () => { axis.smoothing = Number(range.value); chosen.set("smoothing", range.value); Chart.all(); });
  over.addEventListener("change", () => { axis.over = over.value; chosen.set("axis", over.value); Chart.all(); });
  log.addEventListener("change", () => { axis.log = log.checked; Chart.all(); });

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const group of groups.children) {
      let here = 0;
      for (const chart of group.querySelectorAll(".chart")) {
        const fits = words.every((word) => chart.dataset.metric.toLowerCase().includes(word));
        chart.hidden = !fits;
        here += fits;
      }
      group.hidden = !here;
      if (group.tagName === "DETAILS" && words.length) group.open = true;
      count += here;
    }
    none.hidden = count > 0;
  }

  function axes() {
    const acted = board.drawn.length && board.drawn.every((run) => run.curves.env_steps);
    const wanted = [["step", "steps"], ...(acted ? [["env", "environment steps"]] : []), ["time", "time"]];
    if (axis.over === "env" && !acted) axis.over = "step";
    over.replaceChildren(...wanted.map(([value, name]) => el("option", { value, selected: value === axis.over }, name)));
  }

  function arrange(there) {
    const shown = new Set(), chart = (name) => found.get(name) ?? found.set(name, new Chart(name)).get(name);
    const parts = (board.drawn.find((run) => run.state.sections)?.state.sections ?? []).filter(([heading]) => heading !== "Staleness").map(([heading, names]) => {
      const here = names.filter((name) => there.get(name) || (there.has(name) && MAIN.has(name)));
      here.forEach((name) => shown.add(name));
      return here.length ? el("div", { class: "group" }, el("h3", {}, heading), el("div", { class: "charts" }, here.map((name) => chart(name).element))) : null;
    });
    const rest = [...there.keys()].filter((name) => !shown.has(name)).sort();
    const was = groups.querySelector("details")?.open;
    if (rest.length) {
      parts.push(el("details", { class: "group", open: was || false, ontoggle: () => Chart.all() }, el("summary", {}, `All other metrics (${rest.length})`),
        el("div", { class: "charts" }, rest.map((name) => chart(name).element))));
    }
    groups.replaceChildren(...parts.filter(Boolean));
    filter();
  }

  return () => {
    const there = metricsThere(), names = JSON.stringify([...there]);
    if (names !== drawn) {
      drawn = names;
      axes();
      arrange(there);
    }
    for (const chart of found.values()) chart.changed();
  };
}

/** How old the tokens were that a step learned from. */
function stalenessSection(place) {
  const names = ["staleness/mean", "staleness/max", "staleness/ess"];
  const made = names.map((name) => new Chart(name));
  place.append(el("div", { class: "charts" }, made.map((chart) => chart.element)));
  return () => {
    const there = metricsThere();
    for (const chart of made) {
      chart.element.hidden = !there.has(chart.metric);
      chart.changed();
    }
  };
}

addEventListener("resize", () => {
  for (const chart of charts) chart.width = 0;
  Chart.all();
});
