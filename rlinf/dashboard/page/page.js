// The page: its sections in order, the bar at the top, the list at the side; one for live and finished runs.

const has = (list) => Boolean(list?.length);
const ofMetric = (run, name) => run.curves.metrics[name]?.some((value) => value > 0);

/** Each: id, title, what it is about, of which news it is drawn anew, whether a run has anything for it, what draws it. */
const SECTIONS = [
  ["beside", "Side by side", "", ["facts", "shown"], () => board.drawn.length > 1, besideSection],
  ["facts", "At a glance", "", ["facts"], (run) => has(run.state.facts), factsSection],
  ["alarms", "Alarms", "", ["alarms"], (run) => has(run.state.alarms), alarmsSection],
  ["why", "Why steps take this long", "What the newest step waited for, and what all of them lost most to.", ["explained"], (run) => has(run.state.sentences), whySection],
  ["roles", "Roles", "", ["roles", "moment"], (run) => run.live ? has(run.moment?.actors) || has(run.roles?.roles) : has(run.state.roles), rolesSection],
  ["minute", "The last minute", "", ["lanes"], (run) => run.live && run.lanes.size > 0, minuteSection],
  ["queues", "Queues", "", ["moment"], (run) => run.live && has(run.moment?.queues), queuesSection],
  ["curves", "Curves", "Point at one to read its value; all of them follow.", ["rows", "shown"], () => board.drawn.some((run) => has(run.curves.steps)), curvesSection],
  ["answers", "What the model wrote", "", ["answers", "status"], (run) => has(run.state.answers?.steps), answersSection],
  ["held-out", "Held-out problems", "The same problems before and after training; those whose answer changed come first.", ["facts"], (run) => has(run.state.held_out), heldOutSection],
  ["episodes", "Episodes", "How often the policy solved its tasks, and videos of some trials, failures first.", ["facts"], (run) => has(run.state.episodes) || has(run.state.success), episodesSection],
  ["staleness", "Staleness", "By how many versions the tokens that a step learned from were older than the weights.", ["rows", "shown"], () => board.drawn.some((run) => ofMetric(run, "staleness/max")), stalenessSection],
  ["memory", "Memory", "", ["moment"], (run) => has(memoryOf(run)), memorySection],
  ["time", "Where the time of a step went", "", ["facts"], (run) => has(run.state.time?.parts), timeSection],
  ["possible", "How far from the possible", "", ["facts"], (run) => has(run.state.possible?.parts), possibleSection],
  ["lanes", "Who did what when", "Steps early, in the middle and at the end, on one time scale. trace.json has all of it, for ui.perfetto.dev.", ["trace"], (run) => has(run.state.lanes), stepsSection],
  ["setup", "Set-up", "What it takes to run it again.", [], (run) => Boolean(run.state.config_text) || has(Object.keys(run.state.environment ?? {})), setupSection],
];

class Section {
  constructor([id, title, about, kinds, there, make]) {
    Object.assign(this, { id, kinds: new Set([...kinds, "state", "focus"]), there, make, stale: true });
    this.body = el("div", { class: "body" });
    this.details = el("details", { open: chosen.get(`open.${id}`, "yes") === "yes" }, el("summary", {}, el("h2", { id: `of-${id}` }, title)), about ? el("p", { class: "about" }, about) : null, this.body);
    this.element = el("section", { id, "aria-labelledby": `of-${id}`, hidden: true }, this.details);
    this.link = el("a", { href: `#${id}`, hidden: true }, title);
    this.details.addEventListener("toggle", () => {
      chosen.set(`open.${id}`, this.details.open ? "yes" : "no");
      if (this.details.open && this.stale) this.draw();
    });
    this.link.addEventListener("click", () => { this.details.open = true; });
    this.drawing = () => this.draw();
  }

  news(kinds) {
    const run = board.focus, shown = Boolean(run && this.there(run));
    const concerned = kinds.some((kind) => this.kinds.has(kind)) || this.element.hidden;
    if (this.element.hidden === shown) this.element.hidden = this.link.hidden = !shown;
    if (!shown || !concerned) return;
    this.stale = true;
    if (this.details.open) frames.draw(this.drawing);
  }

  draw() {
    const run = board.focus;
    if (!run || !this.there(run)) return;
    this.stale = false;
    this.update ??= this.make(this.body);
    this.update(run);
  }
}

// The bar at the top ---------------------------------------------------------------------------------------------------

function topBar(place) {
  const name = el("h1"), state = el("span", { class: "state" }), about = el("p", { class: "soft" });
  const progress = el("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0 }, el("i"));
  const steps = el("b", { class: "steps" }), left = el("span", { class: "soft" }), asked = el("div", { class: "asks" });
  const lost = el("p", { class: "lost", role: "status", hidden: true });
  const bring = controls(asked);
  place.append(el("div", { class: "title" }, name, state, el("span", { class: "count" }, steps, left)), progress, asked, lost);
  board.connection = (text) => { say(lost, text); lost.hidden = !text; };
  return (run) => {
    const { said, step, steps: planned } = run, done = planned ? step / planned : 1;
    say(name, run.name);
    say(state, said);
    state.className = `state ${run.live ? (said === "paused" || said === "stopping" ? "waits" : "going") : said === "finished" || said === "ended" ? "over" : "open"}`;
    say(steps, planned && step < planned ? `step ${step.toLocaleString("en")} of ${planned.toLocaleString("en")}` : many(step, "step"));
    say(left, run.live && run.left !== null ? `${lasting(run.left)} left, ${lasting(run.pace)} a step` : "");
    progress.firstChild.style.width = `${Math.min(1, done) * 100}%`;
    progress.setAttribute("aria-valuemax", planned ?? step);
    progress.setAttribute("aria-valuenow", step);
    progress.hidden = !planned || (step >= planned && !run.live);
    document.title = run.live ? `${step}${planned ? `/${planned}` : ""} · ${run.name}` : `${run.name}: training report`;
    bring(run);
  };
}

/** Which runs there are: the name shows a run's details, the box its curves. */
function picker(place) {
  const list = el("ul", { class: "runs", "aria-label": "runs" });
  place.append(list);
  const bring = keyed(list, (run) => {
    const box = el("input", { type: "checkbox", "aria-label": `curves of ${run.name}` }), button = el("button", {}), about = el("small");
    box.addEventListener("change", () => board.show(run.id, box.checked));
    button.addEventListener("click", () => board.look(run.id));
    return { element: el("li", { class: `run${run.number % COLOURS}` }, el("label", {}, box, el("i", { class: "line" })), button, about), box, button, about };
  });
  return () => {
    place.hidden = board.runs.length < 2;
    bring(board.runs, (run) => run.id, ({ element, box, button, about }, run) => {
      box.checked = board.shown.has(run.id);
      say(button, run.name);
      button.setAttribute("aria-current", String(run === board.focus));
      say(about, `${run.said}${run.steps ? ` ${run.step}/${run.steps}` : ""}`);
      element.classList.toggle("live", run.live || run.said === "running");
    });
  };
}

/** Why a page shows files alone of a run that has not come to its end in order, and what to do; text with code. */
function notLive(run) {
  if (run.live) return "";
  if (run.state.elsewhere) return `The job is on ${run.state.elsewhere.machine}: these are its files, as they grow. To see it live and to steer it, run \`${run.state.elsewhere.command}\` on your own machine, and open the address that it prints.`;
  if (run.said === "ended without saying so") return "The job's process is gone, and it did not come to its end in order: it was killed, or its machine went down. The same command with `--resume auto` goes on from its last checkpoint.";
  return "";
}

// All of it ------------------------------------------------------------------------------------------------------------

function begin() {
  const carried = JSON.parse(document.getElementById("state").textContent);
  const head = document.querySelector("header"), nav = document.querySelector("nav"), main = document.querySelector("main");
  const runs = el("div", { hidden: true }), about = el("p", { class: "about-run" }), away = el("p", { class: "card pad away", role: "status", hidden: true }), empty = el("p", { class: "card pad", role: "status" }, carried.live ? "Reading the run …" : "No step is over yet.");
  const bar = topBar(head), pick = picker(runs), sections = SECTIONS.map((each) => new Section(each));
  head.after(runs);
  document.querySelector(".frame").prepend(nav);
  nav.append(...sections.map((section) => section.link));
  main.append(about, away, empty, ...sections.map((section) => section.element));
  let kinds = new Set();

  const flush = () => {
    const told = [...kinds], run = board.focus;
    kinds = new Set();
    pick();
    if (!run) return;
    bar(run);
    say(about, (run.state.about ?? []).join(" · "));
    const why = notLive(run);
    away.hidden = !why;
    if (away.textContent !== why.replaceAll("`", "")) away.replaceChildren(...code(why));
    for (const section of sections) section.news(told);
    empty.hidden = has(run.curves.steps) || run.live;
    if (run.read !== false) say(empty, board.live && run.said.startsWith("ended") ? "The run ended before its first step was over; what it printed says why." : "No step is over yet.");
  };
  board.told = (run, news) => {
    if (run && run !== board.focus && !board.shown.has(run.id)) { frames.draw(pick); return; }
    for (const kind of news) if (!run || run === board.focus || kind === "rows" || kind === "state") kinds.add(kind === "state" && run && run !== board.focus ? "shown" : kind);
    if (news.includes("status") || news.includes("roles") || news.includes("rows")) kinds.add("status");
    frames.draw(flush);
  };
  board.show = (id, wanted) => {
    if (wanted) board.shown.add(id); else if (board.shown.size > 1) board.shown.delete(id);
    if (!board.shown.has(board.focus?.id)) board.focus = board.drawn[0];
    need();
    board.told(null, ["shown", "focus"]);
  };
  board.look = (id) => {
    board.focus = board.get(id);
    board.shown.add(id);
    need();
    board.told(null, ["shown", "focus"]);
  };
  board.list = (found) => {
    for (const each of found) {
      const run = board.get(each.id);
      if (run) Object.assign(run.state, { status: each.status, step: Math.max(run.state.step ?? 0, each.step ?? 0) });
      else board.runs.push(Object.assign(new Run({ ...each, curves: undefined }, board.runs.length), { read: false }));
    }
    if (!board.focus && board.runs.length) {
      const first = board.runs.find((run) => /running|live|step|paused/.test(run.state.status ?? "")) ?? board.runs[0];
      board.look(first.id);
    }
    board.told(board.focus, ["status"]);
  };
  const need = () => {
    if (!board.live) return;
    server.read(board.drawn.filter((run) => run.read === false).map((run) => run.id)).catch((error) => board.connection(String(error.message ?? error)));
    server.follow(board.shown);
  };

  const current = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) sections.find(({ element }) => element === target).link.classList.toggle("here", isIntersecting);
  }, { rootMargin: "-15% 0px -75%" });
  sections.forEach(({ element }) => current.observe(element));
  dark.addEventListener("change", () => { paint.values.clear(); board.told(null, ["focus"]); });

  board.live = carried.live;
  if (board.live) {
    server.start();
    return;
  }
  board.runs = carried.runs.map((state, number) => new Run({ ...state, id: `${number}` }, number));
  board.runs.forEach((run) => board.shown.add(run.id));
  [board.focus] = board.runs;
  flush();
  for (const section of sections) section.news(["state"]);
}

begin();
