// Sample answers and conversations: each token coloured by what is known of it. Answers are hostile until proven otherwise.

const MODES = { text: "text", logprob: "log-prob", mask: "mask", version: "weight version" };
const VERSION = "How often the weights had been updated when they made this answer. Updates of a warm-up count too: a step's number may be lower.";
const LONG = 160, MOST_STEPS = 32, COARSE = [0, -0.1, -0.5, -1, -2, -4, -8];

function answersSection(place) {
  const slider = el("input", { type: "range", min: 0, "aria-label": "step" }), picked = el("output", { class: "picked" });
  const back = el("button", { "aria-label": "earlier step" }, "‹"), on = el("button", { "aria-label": "later step" }, "›");
  const newest = el("label", { class: "newest" }, el("input", { type: "checkbox", checked: true }), " newest");
  const modes = el("div", { class: "modes", role: "radiogroup", "aria-label": "colour tokens by" });
  const key = el("div", { class: "key" }), list = el("div", { class: "answers" }), hint = el("output", { class: "hint soft small", "aria-live": "polite" });
  place.append(el("div", { class: "tools" }, el("span", { class: "stepper" }, back, slider, on, picked), newest, modes), key, list, hint);
  let run = null, steps = [], at = null, mode = chosen.get("tokens", "logprob"), drawn = "";
  const follow = newest.firstChild;

  const go = (index) => {
    at = steps[Math.max(0, Math.min(steps.length - 1, index))];
    follow.checked = at === steps.at(-1);
    draw();
  };
  slider.addEventListener("input", () => go(Number(slider.value)));
  back.addEventListener("click", () => go(steps.indexOf(at) - 1));
  on.addEventListener("click", () => go(steps.indexOf(at) + 1));
  follow.addEventListener("change", () => { if (follow.checked) go(steps.length - 1); });
  for (const [value, name] of Object.entries(MODES)) {
    const input = el("input", { type: "radio", name: "tokens", value, checked: value === mode });
    input.addEventListener("change", () => { mode = value; chosen.set("tokens", value); drawn = ""; draw(); });
    modes.append(el("label", {}, input, name));
  }
  list.addEventListener("pointermove", (event) => {
    const token = event.target.closest?.(".token");
    if (token) tip.show(token.told(), event.clientX, event.clientY); else tip.hide();
  });
  list.addEventListener("pointerleave", () => tip.hide());
  list.addEventListener("keydown", (event) => {
    const text = event.target.closest?.(".tokens"), move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!text || !move) return;
    event.preventDefault();
    const tokens = [...text.querySelectorAll(".token")], now = tokens.findIndex((token) => token.classList.contains("at"));
    tokens[now]?.classList.remove("at");
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, now + move))];
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    say(hint, next.told());
  });

  async function draw() {
    slider.max = Math.max(0, steps.length - 1);
    slider.value = steps.indexOf(at);
    slider.setAttribute("aria-valuetext", `step ${at}`);
    say(picked, `step ${at}`);
    const focus = run, step = at;
    if (!run.rows.has(step) && board.live) {
      const rows = await answersOf(run, step);
      if (rows) focus.rows.set(step, rows);
      // Whoever follows the newest step for days keeps the answers of the last few, not of all.
      if (focus.rows.size > MOST_STEPS) focus.rows.delete(focus.rows.keys().next().value);
      if (focus !== run || step !== at) return;
    }
    const rows = run.rows.get(step) ?? [], what = `${run.id} ${step} ${mode} ${rows.length}`;
    if (what === drawn) return;
    drawn = what;
    const tokens = rows.some((row) => row.tokens?.texts?.length);
    modes.hidden = !tokens;
    key.replaceChildren(...(tokens && mode !== "text" ? [keyOf(mode, rows)] : []));
    const long = rows.some((row) => String(row.prompt ?? "").length + String(row.response ?? "").length > LONG);
    list.classList.toggle("long", long);
    const groups = [];
    for (const row of rows) {
      if (groups.at(-1)?.[0].prompt !== row.prompt) groups.push([]);
      groups.at(-1).push(row);
    }
    list.replaceChildren(...groups.map((group) => el("article", { class: "card" }, el("pre", { class: "prompt", tabindex: 0, "aria-label": "prompt" }, told(group[0].prompt)),
      group.map((row) => answer(row, mode, run)), leftOut(group))));
    if (!rows.length) list.replaceChildren(el("p", { class: "soft" }, "No answers of this step are here."));
  }

  return (focus) => {
    if (focus !== run) { run = focus; at = null; drawn = ""; }
    // A page without a server has the answers of some steps only.
    steps = board.live ? run.state.answers.steps : [...run.rows.keys()].sort((one, other) => one - other);
    newest.hidden = !run.live;
    if (at === null || !steps.includes(at) || (run.live && follow.checked)) at = steps.at(-1);
    draw();
  };
}

/** How many answers a prompt had, where not all of them are here. */
function leftOut(group) {
  const all = group[0].group;
  return isNumber(all) && all > group.length ? el("p", { class: "soft small" }, `${group.length} of the ${all} answers to this prompt`) : null;
}

/** A text; what would not be seen is told. */
function told(value) {
  const text = value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return text.trim() ? text : el("span", { class: "soft" }, text ? "(blanks)" : "(empty)");
}

function badge(row) {
  if (!isNumber(row.reward)) return el("span", { class: "badge none" }, "no reward");
  return el("span", { class: `badge ${row.reward > 0.5 ? "good" : "bad"}`, title: "reward" }, short(row.reward));
}

function answer(row, mode, run) {
  const facts = [];
  if (row.answer !== undefined && row.answer !== null && row.answer !== "") facts.push(`right answer ${typeof row.answer === "string" ? row.answer : JSON.stringify(row.answer)}`);
  if (isNumber(row.advantage)) facts.push(`advantage ${row.advantage < 0 ? "−" : "+"}${Math.abs(row.advantage).toFixed(2)}`);
  if (isNumber(row.length)) facts.push(many(row.length, "token"));
  if (row.outcome && row.outcome !== "ok") facts.push(row.outcome);
  if (row.versions?.length) facts.push(el("span", { title: VERSION }, `weights version ${[...new Set([row.versions[0], row.versions.at(-1)])].join("–")}`));
  for (const [name, value] of Object.entries(row.scores ?? {})) facts.push(`${name} ${isNumber(value) ? short(value) : value}`);
  if (row.remark) facts.push(String(row.remark));
  const coloured = mode !== "text" && row.tokens?.texts?.length;
  const body = coloured ? tokenText(row.tokens, mode, run) : whole(row);
  return el("div", { class: "answer" }, badge(row), el("div", {}, body, el("div", { class: "meta" }, facts.map((fact) => (fact instanceof Element ? fact : el("span", {}, fact)))), row.turns?.length ? trace(row) : null));
}

/** The turns of an agent's answer, one below the other: when, how long, what was read and said, tools, reward, why it ended. */
function trace(row) {
  const seconds = (value) => `${value.toFixed(value < 10 ? 2 : 0)} s`, times = row.times ?? [];
  const calls = row.turns.reduce((sum, turn) => sum + (turn.calls?.length ?? 0), 0);
  const last = times.at(-1), about = [many(row.turns.length, "turn"), calls ? many(calls, "tool call") : "", last ? seconds(last[0] + last[1]) : ""];
  const longest = Math.max(...times.map(([start, took]) => start + took), 1e-9);
  return el("details", { class: "trace" }, el("summary", {}, `trace: ${about.filter(Boolean).join(", ")}`), el("ol", {}, row.turns.map((turn, number) => {
    const time = times[number], facts = [time ? `after ${seconds(time[0])}, took ${seconds(time[1])}` : "", many(turn.tokens?.[1] ?? 0, "token"), turn.finish ? `ended by ${turn.finish}` : "", isNumber(turn.reward) && turn.reward ? `reward ${short(turn.reward)}` : ""];
    const bar = time ? el("span", { class: "bar", "aria-hidden": "true" }, el("i")) : null;
    if (bar) { bar.firstChild.style.marginLeft = `${100 * time[0] / longest}%`; bar.firstChild.style.width = `${Math.max(0.5, 100 * time[1] / longest)}%`; }
    return el("li", {}, bar, el("div", { class: "meta" }, facts.filter(Boolean).map((fact) => el("span", {}, fact))), turn.read ? el("pre", { class: "read" }, told(turn.read)) : null, el("pre", {}, told(turn.said)),
      (turn.calls ?? []).map((call) => el("div", { class: "meta" }, call.broken ? `broken call: ${call.broken}` : `calls ${call.name}(${JSON.stringify(call.arguments)})`)));
  })));
}

/** An answer as a text; what the model only read, as a tool's output, looks like it. Places are in characters, not in UTF-16. */
function whole(row) {
  if (typeof row.response !== "string" || !row.read?.length) return el("pre", {}, told(row.response));
  const letters = [...row.response], piece = (begin, end) => letters.slice(begin, end).join("");
  const text = el("pre", { class: "whole" });
  let at = 0;
  for (const [begin, end] of row.read) {
    text.append(piece(at, begin), el("span", { class: "read", title: "read, not learned" }, piece(begin, end)));
    at = end;
  }
  text.append(piece(at));
  return text;
}

// Tokens ---------------------------------------------------------------------------------------------------------------

function tokenText(tokens, mode, run) {
  const text = el("pre", { class: `tokens by-${mode}`, tabindex: 0, role: "group", "aria-label": "answer, token by token: arrow keys read each" });
  const newest = Math.max(...(tokens.versions ?? [0]));
  tokens.texts.forEach((piece, i) => {
    const logprob = tokens.logprobs?.[i], learned = tokens.mask ? tokens.mask[i] !== 0 : true, version = tokens.versions?.[i];
    const token = el("span", { class: `token ${shade(mode, logprob, learned, version, newest)}` }, String(piece));
    token.told = () => [`“${piece}”`, isNumber(logprob) ? `log-prob ${logprob.toFixed(2).replace("-", "−")}, p ${short(Math.exp(logprob))}` : "not sampled",
      learned ? "learned" : "read, not learned", version >= 0 ? `weights version ${version}` : ""].filter(Boolean).join(" · ");
    text.append(token);
  });
  if (tokens.cut) text.append(el("span", { class: "soft" }, ` … ${many(tokens.cut, "more token")}`));
  return text;
}

function shade(mode, logprob, learned, version, newest) {
  if (mode === "mask") return learned ? "learned" : "read";
  if (!learned) return "read";
  if (mode === "version") return version >= 0 ? `v${Math.min(5, newest - version)}` : "read";
  return isNumber(logprob) ? `p${COARSE.findLastIndex((limit) => logprob <= limit)}` : "read";
}

function keyOf(mode, rows) {
  const sample = (name, text) => el("li", {}, el("span", { class: `token ${name}` }, "  "), text);
  const read = sample("read", "read, not learned");
  if (mode === "mask") return el("ul", { class: "legend tokens by-mask" }, sample("learned", "learned"), read);
  if (mode === "logprob") return el("ul", { class: "legend tokens by-logprob" }, COARSE.map((limit, i) => sample(`p${i}`, i ? `≤ ${String(limit).replace("-", "−")}` : "sure")), read);
  const oldest = Math.max(0, ...rows.map(({ tokens }) => Math.max(...(tokens?.versions ?? [0])) - Math.min(...(tokens?.versions ?? [0]).filter((each) => each >= 0), Infinity)).filter(isNumber));
  return el("ul", { class: "legend tokens by-version" }, Array.from({ length: Math.min(5, oldest) + 1 }, (_, age) => sample(`v${age}`, age ? `${many(age, "version")} older` : "newest of the answer")), read);
}

// Held-out problems ----------------------------------------------------------------------------------------------------

function heldOutSection(place) {
  return ({ state: { held_out: pairs } }) => {
    const cell = (row) => el("td", {}, el("div", { class: "clamp", tabindex: 0 }, badge(row), " ", told(row.response)));
    const once = pairs.every(([before, after]) => before.step === after.step);
    place.replaceChildren(el("div", { class: "card scroll", tabindex: 0 }, el("table", { class: "texts" },
      el("thead", {}, el("tr", {}, ["problem", once ? null : "before", `after step ${pairs[0][1].step}`, "right answer"].filter(Boolean).map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, pairs.map(([before, after]) => el("tr", {}, el("td", {}, el("div", { class: "clamp", tabindex: 0 }, told(after.prompt))), once ? null : cell(before), cell(after), el("td", {}, told(after.answer))))))));
  };
}

// Episodes -------------------------------------------------------------------------------------------------------------

const AT_ONCE = 8;

function episodesSection(place) {
  const success = el("div"), tools = el("div", { class: "tools" }), films = el("div", { class: "films" });
  place.append(success, tools, films);
  const step = el("select", { "aria-label": "step of the videos" }), kind = el("select", { "aria-label": "which episodes" },
    ["all", "failures", "successes"].map((name) => el("option", { value: name }, name)));
  const more = el("button", {}, "show more");
  tools.append(el("label", {}, "videos after ", step), el("label", {}, "of ", kind));
  let run = null, count = AT_ONCE, drawn = "";
  for (const select of [step, kind]) select.addEventListener("change", () => { count = AT_ONCE; draw(); });
  more.addEventListener("click", () => { count += AT_ONCE; draw(); });

  function draw() {
    const wanted = (run.state.episodes ?? []).filter((each) => String(each.step) === step.value && (kind.value === "all" || each.success === (kind.value === "successes")));
    const what = wanted.slice(0, count);
    films.replaceChildren(...what.map((each) => {
      const path = each.video.split("/").map(encodeURIComponent).join("/"), src = board.live ? `api/runs/${encodeURIComponent(run.id)}/video/${path}` : `${run.state.videos ?? "videos"}/${path}`;
      const outcome = each.success === null ? "" : each.success ? "success" : "failure";
      const film = /\.(webp|gif)$/.test(each.video) ? el("img", { src, alt: `episode ${each.video}`, loading: "lazy" }) : el("video", { src, controls: true, loop: true, muted: true, preload: "metadata", playsinline: true });
      return el("figure", { class: "card" }, film, el("figcaption", {}, outcome ? el("span", { class: `badge ${each.success ? "good" : "bad"}` }, outcome) : null, el("span", {}, [each.task, each.video.split("/").at(-1).replace(/(-success|-failure)?\.\w+$/, "")].filter(Boolean).join(" · "))));
    }), ...(wanted.length > count ? [more] : []));
  }

  return (focus) => {
    run = focus;
    const rows = run.state.success ?? [], share = (value) => (isNumber(value) ? percent(value, 1) : "");
    success.replaceChildren(...(rows.length ? [el("div", { class: "card scroll", tabindex: 0 }, el("table", { class: "compared" },
      el("thead", {}, el("tr", {}, ["suite or task", "episodes", "before", "success", "95 % interval", "mean return"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row", class: row.task ? "within" : null }, row.name), [String(row.episodes), share(row.before), share(row.success), isNumber(row.low) ? `${share(row.low)} to ${share(row.high)}` : "", short(row.return)].map((text) => el("td", {}, text)))))))] : []));
    const steps = [...new Set((run.state.episodes ?? []).map((each) => each.step))], what = `${run.id} ${JSON.stringify(run.state.episodes ?? [])}`;
    tools.hidden = films.hidden = !steps.length;
    if (what === drawn) return;
    drawn = what;
    const was = step.value;
    step.replaceChildren(...steps.map((each) => el("option", { value: each }, each ? `step ${each}` : "no step yet")));
    if (steps.map(String).includes(was)) step.value = was;
    draw();
  };
}
