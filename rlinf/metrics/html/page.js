"use strict";
// Draws the curves of one run or several from the numbers that the page carries. Text reaches the page by textContent
// alone.
(() => {
  const data = JSON.parse(document.getElementById("numbers").textContent);
  const SVG = "http://www.w3.org/2000/svg", LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 150, COLOURS = 6;
  const smoothing = document.getElementById("smoothing"), axis = document.getElementById("axis");
  const charts = [];

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(4)));
  };
  const clock = (seconds) => {
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
    const two = (n) => String(n).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };
  // A running mean whose first values are not drawn towards zero, as in Adam's moments.
  const smooth = (values, weight) => {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  };
  const ticks = (low, high) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / 3));
    const spacing = [1, 2, 5, 10].map((n) => n * power).find((n) => (high - low) / n <= 5);
    const found = [];
    for (let n = Math.ceil(low / spacing); n * spacing <= high + 1e-12; n += 1) found.push(n * spacing);
    return found;
  };

  class Curve {
    constructor(run, number, metric) {
      this.run = run;
      this.number = number;
      this.values = run.metrics[metric];
      this.known = this.values.flatMap((value, index) => (value === null ? [] : [index]));
      this.x = () => ({ time: run.elapsed, env: run.env_steps, step: run.steps })[axis.value];
    }
    smoothed() {
      // What is measured now and then, such as an accuracy, is shown as it was.
      this.weight = this.known.length < this.values.length / 2 ? 0 : Number(smoothing.value);
      this.line = smooth(this.values, this.weight);
      return this;
    }
    at(place) {
      const x = this.x();
      return this.known.findLast((index) => x[index] <= place) ?? this.known[0];
    }
  }

  class Chart {
    constructor(place) {
      const metric = place.dataset.metric;
      this.curves = data.runs.flatMap((run, number) => {
        const found = run.metrics[metric] ? new Curve(run, number, metric) : null;
        return found && found.known.length ? [found] : [];
      });
      this.output = place.querySelector("output");
      this.svg = make("svg", { role: "img", "aria-label": metric }, place);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => charts.forEach((chart) => chart.rest()));
      this.draw();
    }
    draw() {
      const width = this.svg.clientWidth || 320;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.svg.replaceChildren();
      const curves = this.curves.map((curve) => curve.smoothed());
      const all = curves.flatMap((curve) => curve.known.map((index) => curve.values[index]));
      const ends = curves.flatMap((curve) => [curve.x()[0], curve.x()[curve.x().length - 1]]);
      let low = Math.min(...all), high = Math.max(...all);
      if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
      const first = Math.min(...ends), last = Math.max(...ends), span = last - first || 1;
      this.place = (value) => LEFT + ((value - first) / span) * (width - LEFT - RIGHT);
      this.value = (at) => first + ((at - LEFT) / (width - LEFT - RIGHT)) * span;
      this.y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
      for (const tick of ticks(low, high)) {
        make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y(tick), y2: this.y(tick) }, this.svg);
        make("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, this.svg).textContent = short(tick);
      }
      const label = axis.value === "time" ? clock : short;
      make("text", { x: LEFT, y: HEIGHT - 4 }, this.svg).textContent = label(first);
      make("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, this.svg).textContent = label(last);
      for (const curve of curves) {
        const series = make("g", { class: `run${curve.number % COLOURS}` }, this.svg);
        if (curve.weight > 0 && curves.length === 1) make("path", { class: "raw", d: this.path(curve, curve.values) }, series);
        make("path", { class: "smooth", d: this.path(curve, curve.line) }, series);
        if (curve.known.length <= 12) {
          for (const i of curve.known) this.dot(curve, i, 3, series);
        }
      }
      this.marks = make("g", {}, this.svg);
      this.rest();
    }
    dot(curve, index, r, parent) {
      make("circle", { class: "dot", cx: this.place(curve.x()[index]), cy: this.y(curve.line[index]), r }, parent);
    }
    path(curve, values) {
      const x = curve.x();
      return curve.known
        .map((i, n) => `${n ? "L" : "M"}${this.place(x[i]).toFixed(1)} ${this.y(values[i]).toFixed(1)}`).join("");
    }
    point(event) {
      const where = this.value(event.clientX - this.svg.getBoundingClientRect().left);
      const near = this.curves.flatMap((curve) => curve.known.map((index) => curve.x()[index]))
        .reduce((best, x) => (Math.abs(x - where) < Math.abs(best - where) ? x : best));
      charts.forEach((chart) => chart.show(near));
    }
    show(where) {
      this.marks.replaceChildren();
      const shown = this.curves.map((curve) => [curve, curve.at(where)]);
      const [lead, index] = shown[0], at = this.place(data.runs.length > 1 ? where : lead.x()[index]);
      make("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, this.marks);
      for (const [curve, i] of shown) this.dot(curve, i, 3.5, make("g", { class: `run${curve.number % COLOURS}` }, this.marks));
      const value = data.runs.length > 1 ? where : lead.x()[index];
      const when = {
        time: () => clock(value), env: () => `${Math.round(value).toLocaleString("en")} environment steps`,
        step: () => `step ${Math.round(value)}`,
      }[axis.value]();
      this.tell(shown, ` at ${when}`);
    }
    rest() {
      this.marks.replaceChildren();
      this.tell(this.curves.map((curve) => [curve, curve.known[curve.known.length - 1]]), "");
    }
    tell(shown, when) {
      this.output.replaceChildren(...shown.map(([curve, index]) => {
        const span = document.createElement("span");
        if (data.runs.length > 1) span.className = `told run${curve.number % COLOURS}`;
        span.textContent = short(curve.values[index]);
        return span;
      }), when);
    }
  }

  const redraw = () => charts.forEach((chart) => chart.draw());
  for (const place of document.querySelectorAll("[data-metric]")) charts.push(new Chart(place));
  smoothing.addEventListener("input", redraw);
  axis.addEventListener("change", redraw);
  addEventListener("resize", redraw);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", redraw);
})();
