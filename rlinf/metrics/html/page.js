"use strict";
// Draws the curves from the numbers that the page carries. Text reaches the page by textContent alone.
(() => {
  const data = JSON.parse(document.getElementById("numbers").textContent);
  const SVG = "http://www.w3.org/2000/svg", LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 150;
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

  class Chart {
    constructor(place) {
      this.values = data.metrics[place.dataset.metric];
      this.known = this.values.flatMap((value, index) => (value === null ? [] : [index]));
      this.output = place.querySelector("output");
      this.svg = make("svg", { role: "img", "aria-label": place.dataset.metric }, place);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => charts.forEach((chart) => chart.rest()));
      this.draw();
    }
    draw() {
      const width = this.svg.clientWidth || 320;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.svg.replaceChildren();
      const x = { time: data.elapsed, env: data.env_steps, step: data.steps }[axis.value];
      // What is measured now and then, such as an accuracy, is shown as it was.
      const weight = this.known.length < this.values.length / 2 ? 0 : Number(smoothing.value);
      this.line = smooth(this.values, weight);
      const all = this.known.map((index) => this.values[index]);
      let low = Math.min(...all), high = Math.max(...all);
      if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
      const first = x[0], last = x[x.length - 1];
      this.x = (index) => LEFT + ((x[index] - first) / (last - first || 1)) * (width - LEFT - RIGHT);
      this.y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
      for (const tick of ticks(low, high)) {
        make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y(tick), y2: this.y(tick) }, this.svg);
        make("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, this.svg).textContent = short(tick);
      }
      const label = axis.value === "time" ? clock : short;
      make("text", { x: LEFT, y: HEIGHT - 4 }, this.svg).textContent = label(first);
      make("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, this.svg).textContent = label(last);
      if (weight > 0) make("path", { class: "raw", d: this.path(this.values) }, this.svg);
      make("path", { class: "smooth", d: this.path(this.line) }, this.svg);
      if (this.known.length <= 12) {
        for (const i of this.known) make("circle", { class: "dot", cx: this.x(i), cy: this.y(this.line[i]), r: 3 }, this.svg);
      }
      this.marks = make("g", {}, this.svg);
      this.rest();
    }
    path(values) {
      return this.known.map((i, n) => `${n ? "L" : "M"}${this.x(i).toFixed(1)} ${this.y(values[i]).toFixed(1)}`).join("");
    }
    point(event) {
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      const distance = (index) => Math.abs(this.x(index) - at);
      const near = this.known.reduce((best, index) => (distance(index) < distance(best) ? index : best));
      charts.forEach((chart) => chart.show(near));
    }
    show(wanted) {
      this.marks.replaceChildren();
      const index = this.known.findLast((known) => known <= wanted) ?? this.known[0];
      const at = this.x(index);
      make("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, this.marks);
      make("circle", { class: "dot", cx: at, cy: this.y(this.line[index]), r: 3.5 }, this.marks);
      const when = {
        time: () => clock(data.elapsed[index]), env: () => `${data.env_steps[index].toLocaleString("en")} environment steps`,
        step: () => `step ${data.steps[index]}`,
      }[axis.value]();
      this.output.textContent = `${short(this.values[index])} at ${when}`;
    }
    rest() {
      this.marks.replaceChildren();
      this.output.textContent = short(this.values[this.known[this.known.length - 1]]);
    }
  }

  const redraw = () => charts.forEach((chart) => chart.draw());
  for (const place of document.querySelectorAll("[data-metric]")) charts.push(new Chart(place));
  smoothing.addEventListener("input", redraw);
  axis.addEventListener("change", redraw);
  addEventListener("resize", redraw);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", redraw);
})();
