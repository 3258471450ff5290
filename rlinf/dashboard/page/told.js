// What a run tells of itself in words and bars: why steps take as long as they do, alarms, facts, time, set-up.

function whySection(place) {
  const newest = el("p", { class: "sentence" }), change = el("p", { class: "change" }), list = el("ul", { class: "causes" });
  const past = el("ol", { class: "past" });
  const older = el("details", { class: "more" }, el("summary", {}, "sentences of earlier steps"), past);
  place.append(el("div", { class: "card pad" }, newest, change, list, older));
  older.addEventListener("toggle", () => tell());
  let run = null;

  function tell() {
    const told = older.open ? [...run.state.sentences].reverse() : [];
    past.replaceChildren(...told.map((each) => el("li", {}, el("b", {}, `step ${each.step}`), " ", ...code(each.text ?? ""))));
  }

  return (focus) => {
    run = focus;
    const { sentences, causes = [] } = run.state, last = sentences.at(-1);
    newest.replaceChildren(el("b", {}, `Step ${last.step}`), " ", ...code(happened(last)), ".");
    advise(change, last);
    const steps = Math.max(1, causes.reduce((sum, each) => sum + each.steps, 0)), most = Math.max(...causes.map((each) => each.seconds), 1e-9);
    list.replaceChildren(...causes.map((each) => {
      const told = el("div", { class: "change" });
      advise(told, each);
      return el("li", {}, el("b", {}, each.cause), bar(each.seconds / most, "--accent", `${each.cause} cost ${lasting(each.seconds)}`),
        el("span", { class: "number" }, `${lasting(each.seconds)} in ${many(each.steps, "step")}`),
        el("small", {}, ...code(happened(each))), told.childNodes.length ? told : null);
    }));
    list.hidden = !causes.length;
    list.setAttribute("aria-label", `what ${steps} steps lost most to`);
    older.hidden = sentences.length < 2;
    tell();
  };
}

/** What a sentence says besides the change that would help, which stands below it. */
const happened = ({ text, change }) => (change ? String(text ?? "").split(`; ${change}`)[0] : text ?? "");

/** The change that would help, if one is known, and what it is predicted to save. */
function advise(place, { text, change }) {
  const gain = /, (which would save [\d.]+ %)$/.exec(text ?? "");
  place.replaceChildren(...(change ? [el("span", { class: "arrow", "aria-hidden": "true" }, "→ "), ...code(change), gain ? `, ${gain[1]}` : ""] : []));
}

/** Text with what stands between backticks as code. */
const code = (text) => String(text).split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

function bar(share, variable, label, start = 0) {
  const part = Number.isFinite(share) ? Math.max(0, Math.min(1, share)) : 0;
  return el("span", { class: "bar", role: "img", "aria-label": label },
    el("i", { style: { "margin-left": `${start * 100}%`, width: `${part * 100}%`, background: `var(${variable})` } }));
}

function alarmsSection(place) {
  const list = el("ul", { class: "alarms", role: "list" });
  place.append(list);
  return (run) => list.replaceChildren(...[...run.state.alarms].reverse().map((alarm) => el("li", { class: "card" },
    el("span", { class: "mark", "aria-hidden": "true" }, "!"), el("div", {}, el("p", {}, isNumber(alarm.step) ? el("b", {}, `Step ${alarm.step} `) : null,
      String(alarm.text ?? "").replace(/^step \d+: /, "")), alarm.do ? el("p", { class: "change" }, el("span", { class: "arrow", "aria-hidden": "true" }, "→ "), ...code(alarm.do)) : null))));
}

function factsSection(place) {
  const list = el("dl", { class: "facts" });
  place.append(list);
  return (run) => list.replaceChildren(...run.state.facts.map(({ label, value, before, note }) => el("div", { class: "card fact" },
    el("dt", {}, label), el("dd", { class: "value" }, before ? el("small", {}, `${before} → `) : null, value), el("dd", { class: "note" }, note))));
}

// Several runs ---------------------------------------------------------------------------------------------------------

function besideSection(place) {
  return () => {
    const runs = board.drawn;
    const unlike = (pick) => {
      const sides = runs.map((run) => pick(run.state) ?? {});
      const keys = [...new Set(sides.flatMap(Object.keys))];
      const told = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
      return keys.map((key) => [key, sides.map((side) => told(side[key]))]).filter(([, values]) => new Set(values).size > 1);
    };
    const measured = [...new Set(runs.flatMap((run) => (run.state.compared ?? []).map(([what]) => what)))]
      .map((what) => [what, runs.map((run) => Object.fromEntries(run.state.compared ?? [])[what] ?? "–")])
      .filter(([, values]) => values.some((value) => value !== "–"));
    const parts = [["", measured, ""], ["Configuration", unlike((state) => state.config), "Keys whose values are not the same."],
      ["Machine", unlike((state) => state.environment), "What is not the same of where they ran."]];
    place.replaceChildren(...parts.flatMap(([heading, rows, about]) => [heading ? el("h3", {}, heading) : null,
      rows.length ? table(runs, rows) : el("p", { class: "soft" }, heading ? "Nothing is unlike." : ""),
      heading && rows.length ? el("p", { class: "soft small" }, about) : null].filter(Boolean)));
  };
}

function table(runs, rows) {
  const heads = runs.map((run) => el("th", { scope: "col", class: `run${run.number % COLOURS}` }, el("i", { class: "line" }), run.name));
  return el("div", { class: "card scroll", tabindex: 0 }, el("table", { class: "compared" }, el("thead", {}, el("tr", {}, el("td"), heads)),
    el("tbody", {}, rows.map(([what, values]) => el("tr", {}, el("th", { scope: "row" }, what), values.map((value) => el("td", {}, value)))))));
}

// Time -----------------------------------------------------------------------------------------------------------------

function timeSection(place) {
  const list = el("div", { class: "card bars" }), about = el("p", { class: "about" });
  place.append(about, list);
  const named = { overlap: "side by side", other: "none of these", switching: "loading and parking" };
  const hues = { switching: "--loading", overlap: "--soft", other: "--waiting" };
  return ({ state: { time } }) => {
    say(about, `Beside the ${lasting(time.step)} of a step${time.over ? ` (${time.over})` : ""}. Roles work at the same time, so the parts may add up to more than the whole.`);
    list.replaceChildren(...time.parts.flatMap(([name, seconds]) => [el("span", {}, named[name] ?? name),
      bar(seconds / time.step, hues[name] ?? hue(name), `${named[name] ?? name}: ${lasting(seconds)}`),
      el("span", { class: "number" }, `${lasting(seconds)}, ${percent(seconds / time.step)}`)]));
  };
}

function possibleSection(place) {
  const list = el("div", { class: "card bars possible" }), about = el("p", { class: "about" });
  place.append(about, list);
  return ({ state: { possible } }) => {
    const ofRoles = `${percent(possible.efficiency)} of what is possible on ${many(possible.devices, "device")}, at what the roles cost in this run. The parts add up to the ${lasting(possible.step)} of a step${possible.over ? ` (${possible.over})` : ""}.`;
    const ofDevices = possible.device ? `${possible.device[0].toUpperCase()}${possible.device.slice(1)}.` : "";
    say(about, (possible.idles ? [ofDevices, ofRoles] : [ofRoles, ofDevices]).filter(Boolean).join(" "));
    let before = 0;
    list.replaceChildren(...possible.parts.flatMap(([name, seconds, meaning], i) => {
      const start = before / possible.step;
      before += Math.max(0, seconds);
      return [el("span", {}, name, el("small", {}, meaning)), bar(seconds / possible.step, i ? "--lost" : "--training", `${name}: ${lasting(seconds)}`, start),
        el("span", { class: "number" }, `${lasting(seconds)}, ${percent(seconds / possible.step)}`)];
    }));
  };
}

function setupSection(place) {
  return ({ state }) => {
    const rows = Object.entries(state.environment ?? {}).map(([name, value]) => [name, Array.isArray(value) ? value.join(", ") : typeof value === "object" && value ? JSON.stringify(value) : String(value ?? "")]);
    place.replaceChildren(...[
      state.config_text ? el("details", { class: "card more" }, el("summary", {}, "Configuration"), el("pre", { tabindex: 0 }, state.config_text)) : null,
      rows.some(([, value]) => value) ? el("details", { class: "card more" }, el("summary", {}, "Environment"),
        el("table", { class: "plain" }, rows.filter(([, value]) => value).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))))) : null,
    ].filter(Boolean));
  };
}
