// The server's side of a live page: which runs there are, their states, what changes, and what a reader asks of a run.

const AGAIN = { least: 1_000, most: 15_000, share: 20 };

const server = {
  source: null,
  following: "",
  refreshed: new Map(),
  took: new Map(),

  async json(path, options) {
    const reply = await fetch(path, { credentials: "same-origin", ...options, headers: { "X-Rlinf": "1", ...options?.headers } });
    const told = await reply.json().catch(() => ({}));
    if (!reply.ok) throw new Error(told.said ?? `${path}: ${reply.status}`);
    return told;
  },

  async state(id) {
    const began = performance.now(), state = await this.json(`api/runs/${encodeURIComponent(id)}/state`);
    this.refreshed.set(id, performance.now());
    this.took.set(id, performance.now() - began);
    return state;
  },

  /** The states of runs that are shown and not yet read. */
  async read(ids) {
    await Promise.all(ids.map(async (id) => {
      const run = board.get(id), state = await this.state(id);
      run.take({ ...state, id, name: run.state.name ?? state.name });
      run.read = true;
      board.told(run, ["state"]);
      this.lanes(run);
    }));
  },

  async lanes(run) {
    if (run.state.lanes?.length || run.live) return;
    const lanes = await this.json(`api/runs/${encodeURIComponent(run.id)}/lanes`).catch(() => []);
    if (lanes.length) {
      run.state.lanes = lanes;
      board.told(run, ["trace"]);
    }
  },

  /** Facts, medians and the bound are computed by Python: read anew while steps come, the less often the longer it takes. */
  again(run) {
    const wait = Math.min(AGAIN.most, Math.max(AGAIN.least, AGAIN.share * (this.took.get(run.id) ?? 0)));
    const due = (this.refreshed.get(run.id) ?? 0) + wait - performance.now();
    if (run.due || document.hidden) return;
    run.due = setTimeout(async () => {
      run.due = null;
      const state = await this.state(run.id).catch(() => null);
      if (!state?.facts) return;  // the bar says that the server is away; the next row asks again
      const { facts, time, possible, success, episodes, held_out } = state;
      Object.assign(run.state, { facts, time, possible, success, episodes, held_out });
      board.told(run, ["facts"]);
    }, Math.max(0, due));
  },

  follow(ids) {
    const wanted = [...ids].sort().join(), known = [...ids].sort().map((id) => board.get(id)?.curves.steps.at(-1) ?? 0);
    if (wanted === this.following || !wanted) return;
    this.following = wanted;
    this.source?.close();
    this.source = new EventSource(`api/events?runs=${encodeURIComponent(wanted)}&since=${known.join()}`);
    let lost = false;
    this.source.onopen = () => {
      board.connection("");
      if (lost) this.read(wanted.split(",")).catch(() => {});
      lost = false;
    };
    this.source.onerror = () => {
      lost = true;
      const refused = this.source.readyState === EventSource.CLOSED;  // then a browser does not try again
      board.connection(refused ? "The server does not know this page any more. Open the newest address that rlinf watch has printed." : "The server does not answer. Trying again …");
    };
    this.source.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (message.kind === "runs") { board.list(message.runs); return; }
      const run = board.get(message.run);
      if (!run) return;
      if (message.kind === "anew") { this.read([run.id]).catch(() => {}); return; }
      const was = run.live;
      run.hear(message);
      if (message.kind === "rows") this.again(run);
      if (message.kind === "did") board.did(message);
      if (was && !run.live) this.read([run.id]).catch(() => {});
      board.told(run, [message.kind]);
    };
  },

  async start() {
    try {
      board.list(await this.json("api/runs"));
    } catch (error) {
      board.connection(String(error.message ?? error));
    }
  },
};

async function answersOf(run, step) {
  return server.json(`api/runs/${encodeURIComponent(run.id)}/answers?step=${step}`).catch(() => null);
}

// Controls -------------------------------------------------------------------------------------------------------------

function controls(place) {
  const said = el("output", { class: "said", "aria-live": "polite" }), buttons = new Map(), group = el("div", { class: "controls", role: "group", "aria-label": "controls of the run" });
  const sure = el("dialog", { "aria-labelledby": "sure" }, el("form", { method: "dialog" }, el("h2", { id: "sure" }, "Stop after this step?"),
    el("p", {}, "The step that is under way is finished, a checkpoint is saved, and the run ends. ", el("code", {}, "--resume auto"), " goes on from there."),
    el("div", { class: "tools" }, el("button", { value: "stop", class: "danger" }, "Stop after this step"), el("button", { value: "", autofocus: true }, "Keep running"))));
  let run = null, last = null;
  sure.addEventListener("close", () => { if (sure.returnValue) ask(last); sure.returnValue = ""; });
  place.append(group, said, sure);

  function make({ what, label, title, final }) {
    const button = el("button", { title, class: final ? "danger" : null, "data-do": what }, label);
    button.addEventListener("click", () => {
      last = what;
      if (final) sure.showModal(); else ask(what);
    });
    buttons.set(what, button);
    group.append(button);
    return button;
  }

  async function ask(what) {
    say(said, "asked …");
    try {
      const reply = await server.json(`api/runs/${encodeURIComponent(run.id)}/do`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ what }),
      });
      say(said, reply.said ?? "");
      said.classList.toggle("bad", reply.ok === false);
    } catch (error) {
      say(said, String(error.message ?? error));
    }
  }
  board.did = (message) => { if (message.said) say(said, message.said); };

  return (focus) => {
    if (run !== focus) say(said, "");
    run = focus;
    group.hidden = !run.live;  // the last answer stays: it says how the run ended
    const asked = run.status?.asked ?? [], paused = run.status?.status === "paused";
    for (const each of run.state.controls ?? []) {
      const { what, late } = each, button = buttons.get(what) ?? make(each);
      button.hidden = each.paused === !paused;
      button.disabled = asked.includes(what) || (run.status?.status === "stopping" && !late);
      button.classList.toggle("asked", asked.includes(what));
    }
  };
}
