// What all parts of the page share: elements, numbers in words, colours, one tooltip.
// Whatever a run wrote is text: it reaches the page by text nodes and by attributes that only name something.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, each] of Object.entries(value)) element.style.setProperty(name, each);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Sets a text only where it changed, so that a page that is updated each second does little. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Numbers --------------------------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + " G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

function clock(seconds) {
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function lasting(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0.0995) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
  if (seconds < 9.95) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

function bytes(count) {
  const unit = ["B", "kB", "MB", "GB", "TB"], power = count ? Math.min(4, Math.floor(Math.log10(count) / 3)) : 0;
  return `${Number((count / 1000 ** power).toPrecision(3))} ${unit[power]}`;
}

const percent = (share, digits = 0) => `${(share * 100).toFixed(digits)} %`;
const many = (count, one, more) => `${count.toLocaleString("en")} ${count === 1 ? one : more ?? one + "s"}`;

// Colours --------------------------------------------------------------------------------------------------------------

const ACTIVITIES = ["generation", "training", "scoring", "simulation", "acting", "sync", "waiting", "loading", "parking",
  "saving"];
const OTHERS = 4;
const COLOURS = 6;
const known = new Map();

/** The CSS variable of what an actor does; an endpoint that is none of ours gets one of a few others, and keeps it. */
function hue(activity) {
  if (ACTIVITIES.includes(activity)) return `--${activity}`;
  if (!known.has(activity)) known.set(activity, `--other${known.size % OTHERS}`);
  return known.get(activity);
}

const paint = { values: new Map() };
function colour(variable) {
  if (!paint.values.has(variable)) {
    paint.values.set(variable, getComputedStyle(document.documentElement).getPropertyValue(variable).trim());
  }
  return paint.values.get(variable);
}
const dark = matchMedia("(prefers-color-scheme: dark)"), still = matchMedia("(prefers-reduced-motion: reduce)");

const swatch = (variable) => el("i", { class: "swatch", style: { background: `var(${variable})` } });

function legend(activities) {
  return el("ul", { class: "legend" }, activities.map((name) => el("li", {}, swatch(hue(name)), name)));
}

// One tooltip ----------------------------------------------------------------------------------------------------------

const tip = {
  element: null,
  show(text, x, y) {
    this.element ??= document.body.appendChild(el("div", { class: "tip", role: "tooltip" }));
    say(this.element, text);
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    this.element.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
    this.element.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

// Work in small portions: what is drawn anew is shared out over frames, so that none is dropped ------------------------

const frames = {
  waiting: new Set(),
  asked: false,
  draw(what) {
    this.waiting.add(what);
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => this.go());
  },
  go() {
    const until = performance.now() + 7;
    this.asked = false;
    for (const what of this.waiting) {
      this.waiting.delete(what);
      what();
      if (performance.now() > until) break;
    }
    if (this.waiting.size && !this.asked) {
      this.asked = true;
      requestAnimationFrame(() => this.go());
    }
  },
};

/** Calls back when an element comes into sight or leaves it. */
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) sight.told.get(entry.target)?.(entry.isIntersecting);
}, { rootMargin: "200px" });
sight.told = new WeakMap();
function whenSeen(element, told) {
  sight.told.set(element, told);
  sight.observe(element);
}

/** What the reader chose stays chosen, where the browser lets a page keep anything. */
const chosen = {
  get(name, otherwise) {
    try { return localStorage.getItem(`rlinf.${name}`) ?? otherwise; } catch { return otherwise; }
  },
  set(name, value) {
    try { localStorage.setItem(`rlinf.${name}`, value); } catch { /* a page from a file may not keep anything */ }
  },
};
