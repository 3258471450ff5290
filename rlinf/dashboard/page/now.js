// What a live run does at this moment: its roles and where they are, its queues, the memory of its devices.

/** Keeps one element per key, in order, and has each brought up to date: what is unchanged is left alone. */
function keyed(place, make) {
  const there = new Map();
  return (items, key, bring) => {
    const wanted = items.map((item) => {
      const name = key(item);
      if (!there.has(name)) there.set(name, make(item));
      bring(there.get(name), item);
      return there.get(name).element;
    });
    if (wanted.length !== place.children.length || wanted.some((element, i) => place.children[i] !== element)) place.replaceChildren(...wanted);
  };
}

const OF_ENDPOINTS = {
  generate: "generation", answer: "generation", score: "scoring", logprobs: "scoring", values: "scoring", outputs: "scoring", held_out: "scoring",
  train: "training", sft: "training", learn: "training", imitate: "training", weights: "sync", load: "sync", load_switch: "sync", follow: "sync",
  save: "saving", act: "acting", trajectory: "acting", step: "simulation", reset: "simulation", observe: "simulation", onload: "loading", offload: "parking",
};
const OF_ROLES = { rollout: "generation", judge: "scoring", reward_model: "scoring", reference: "scoring", trainer: "training", critic: "training", env: "simulation", trials: "simulation", policy: "acting" };

/** What an actor is at: by the endpoint, or where it only computes by what its role is for. */
function activityOf(doing, actor) {
  if (!doing || doing === "idle") return null;
  if (/^wait/.test(doing)) return "waiting";
  return OF_ENDPOINTS[doing] ?? (ACTIVITIES.includes(doing) ? doing : OF_ROLES[actor.split("[")[0]] ?? null);
}

function rolesSection(place) {
  const mode = el("p", { class: "about" }), list = el("ul", { class: "roles" });
  place.append(mode, list);
  const bring = keyed(list, () => {
    const dot = el("i", { class: "dot" }), name = el("b"), doing = el("span", { class: "doing" }), where = el("small");
    return { element: el("li", { class: "card" }, dot, name, doing, where), dot, name, doing, where };
  });
  return (run) => {
    const machines = run.roles?.machines ?? {}, devices = new Map();
    for (const { host, device } of run.moment?.memory ?? []) devices.set(host, devices.has(host) ? `${devices.get(host)}, ${device}` : device);
    const whose = (host) => [machines[host], devices.get(host) ?? null].filter(Boolean).join(" · ");
    const named = (run.roles?.roles ?? []).flatMap(({ role, hosts = [] }) => hosts.map((host, i) => ({ actor: `${role}[${i}]`, host })));
    const actors = (run.moment?.actors?.length ? run.moment.actors : named)
      .toSorted((one, other) => one.actor.localeCompare(other.actor, "en", { numeric: true }));
    const groups = new Set(named.map(({ host }) => host)).size;
    say(mode, [run.roles?.mode, groups ? many(groups, "process", "processes") : "", `${many(new Set(actors.map(({ actor }) => actor.split("[")[0])).size, "role")}, ${many(actors.length, "actor")}`].filter(Boolean).join(" · "));
    list.classList.toggle("many", actors.length > 24);
    bring(actors, ({ actor, host }) => `${host} ${actor}`, (row, { actor, host, doing, since }) => {
      const activity = activityOf(doing, actor), idle = !doing || doing === "idle", lasted = isNumber(since) ? since : null;
      say(row.name, actor);
      say(row.doing, idle ? "idle" : `${doing.replace(/^computing _\w+$/, "computing")}${lasted >= 0.1 ? ` ${lasting(lasted)}` : ""}`);
      row.doing.title = doing ?? "";
      say(row.where, `host ${host}${whose(host) ? ` · ${whose(host)}` : ""}`);
      const shade = !idle ? `var(${activity ? hue(activity) : "--other0"})` : "var(--idle)";
      if (row.shade !== shade) row.dot.style.background = row.shade = shade;
      row.element.classList.toggle("idle", idle);
    });
  };
}

function queuesSection(place) {
  const list = el("ul", { class: "queues card" }), most = new Map();
  place.append(list);
  const bring = keyed(list, () => {
    const row = { name: el("b"), fill: el("i"), full: el("span", { class: "number" }), flow: el("small"), waits: el("span", { class: "waits" }) };
    row.bar = el("span", { class: "bar", role: "img" }, row.fill);
    row.element = el("li", {}, el("div", {}, row.name, row.flow), row.bar, row.full, row.waits);
    return row;
  });
  return (run) => bring(run.moment.queues, ({ host, name }) => `${host} ${name}`, (row, queue) => {
    const key = `${run.id} ${queue.host} ${queue.name}`;
    most.set(key, Math.max(most.get(key) ?? 1, queue.ready));
    const room = queue.capacity ?? most.get(key), told = queue.capacity ? `${queue.ready} of ${queue.capacity}` : `${queue.ready} ready`;
    say(row.name, queue.name);
    say(row.flow, `${short(queue.put ?? 0)} put, ${short(queue.taken ?? 0)} taken${queue.host !== undefined ? ` · host ${queue.host}` : ""}`);
    say(row.full, told);
    row.bar.setAttribute("aria-label", `${queue.name}: ${told}`);
    row.fill.style.width = `${Math.min(1, queue.ready / Math.max(1, room)) * 100}%`;
    row.fill.style.background = queue.capacity && queue.ready >= queue.capacity ? "var(--bad)" : "var(--accent)";
    const waits = [...(queue.waiting_to_take ?? []).map((who) => `${who} waits for items`), ...(queue.waiting_to_put ?? []).map((who) => `${who} waits for room`)];
    const shown = waits.length > 4 ? [...waits.slice(0, 4), `and ${waits.length - 4} more`] : waits;
    if (row.waiting !== shown.join()) {
      row.waiting = shown.join();
      row.waits.replaceChildren(...shown.map((text) => el("span", { class: "chip" }, text)));
    }
  });
}

const memoryOf = (run) => run.moment?.memory ?? run.state.memory ?? [];

function memorySection(place) {
  const list = el("div", { class: "card bars" });
  place.append(list);
  const rows = new Map();
  return (run) => {
    const memory = memoryOf(run), most = Math.max(1, ...memory.map(({ used }) => used));
    const names = memory.map(({ host, device }) => `${host} ${device}`).join("\n");
    if (list.dataset.of !== names) {
      list.dataset.of = names;
      rows.clear();
      list.replaceChildren(...memory.flatMap(({ host, device }) => {
        const row = { fill: el("i"), text: el("span", { class: "number" }) };
        rows.set(`${host} ${device}`, row);
        row.bar = el("span", { class: "bar", role: "img" }, row.fill);
        return [el("span", {}, `host ${host} · ${device}`), row.bar, row.text];
      }));
    }
    for (const { host, device, used, total } of memory) {
      const row = rows.get(`${host} ${device}`), share = used / (total || most);
      row.fill.style.width = `${Math.min(1, share) * 100}%`;
      row.fill.style.background = total && share > 0.92 ? "var(--bad)" : "var(--accent)";
      say(row.text, total ? `${bytes(used)} of ${bytes(total)}, ${percent(share)}` : bytes(used));
      row.bar.setAttribute("aria-label", `host ${host}, ${device}: ${row.text.textContent}`);
    }
  };
}
