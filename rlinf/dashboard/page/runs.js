// The runs of the page: the state of each, and what its feed told since. Drawing is not done here.

const MOST_POINTS = 1600, MINUTE = 60, KEPT = MINUTE + 20, TOUCHING = 0.02;

class Run {
  constructor(state, number) {
    this.id = state.id ?? state.directory;
    this.number = number;
    this.roles = null;
    this.status = null;
    this.moment = null;
    this.lanes = new Map();
    this.now = 0;
    this.rows = new Map();
    this.take(state);
  }

  /** A state as the server, or Python, read it from the run's directory. */
  take(state) {
    this.state = state;
    this.curves = state.curves ?? { steps: [], elapsed: [], env_steps: null, metrics: {} };
    this.rows = new Map(Object.entries(state.answers?.shown ?? {}).map(([step, rows]) => [Number(step), rows]));
    const step = this.curves.steps.at(-1) ?? 0;
    if (step > (state.step ?? 0)) state.step = step;
  }

  get name() { return this.state.name ?? this.id; }
  get step() { return Math.max(this.status?.step ?? 0, this.state.step ?? 0); }
  get steps() { return this.roles?.steps ?? this.state.steps ?? null; }
  get live() { return Boolean(this.status && this.status.status !== "ended"); }
  get said() { return this.live ? this.status.status : this.state.status ?? ""; }

  /** Seconds of a step lately, and seconds that are left; null where nobody can know. */
  get pace() {
    const { elapsed, steps } = this.curves, last = steps.length - 1, first = Math.max(0, last - 10);
    const done = steps[last] - steps[first];
    return done > 0 ? (elapsed[last] - elapsed[first]) / done : null;
  }
  get left() {
    return this.pace !== null && this.steps > this.step ? this.pace * (this.steps - this.step) : null;
  }

  /** New rows of metrics.jsonl. */
  add(rows) {
    const { steps, elapsed, metrics } = this.curves;
    for (const row of rows) {
      if (!Number.isInteger(row.step)) continue;
      while (steps.length && steps.at(-1) > row.step) this.drop();
      if (steps.at(-1) !== row.step) {
        steps.push(row.step);
        elapsed.push(row["timing/elapsed"] ?? (elapsed.at(-1) ?? 0) + (row["timing/step"] ?? 0));
        if (this.curves.env_steps) this.curves.env_steps.push(row["env_steps/total"] ?? this.curves.env_steps.at(-1) ?? 0);
        for (const values of Object.values(metrics)) values.push(null);
      }
      for (const [name, value] of Object.entries(row)) {
        if (name === "step" || !isNumber(value)) continue;
        metrics[name] ??= new Array(steps.length).fill(null);
        metrics[name][steps.length - 1] = value;
      }
      this.state.step = Math.max(this.state.step ?? 0, row.step);
    }
    if (steps.length > MOST_POINTS) this.thin();
  }

  drop() {
    const { steps, elapsed, env_steps: acted, metrics } = this.curves;
    for (const values of [steps, elapsed, acted, ...Object.values(metrics)]) values?.pop();
  }

  /** Two points become one: the later of both along the axes, the mean of what was measured. */
  thin() {
    const halved = (values, join) => values.filter((_, i) => i % 2 === 0).map((_, i) => join(values[2 * i], values[2 * i + 1]));
    const later = (one, other) => other ?? one;
    const mean = (one, other) => (isNumber(one) && isNumber(other) ? (one + other) / 2 : one ?? other ?? null);
    const { curves } = this;
    for (const name of ["steps", "elapsed", "env_steps"]) if (curves[name]) curves[name] = halved(curves[name], later);
    for (const [name, values] of Object.entries(curves.metrics)) curves.metrics[name] = halved(values, mean);
  }

  /** An increment of what actors did; touching stretches of one activity are one. */
  did({ end, lanes }) {
    this.now = Math.max(this.now, end);
    for (const { host, actor, stretches } of lanes) {
      const key = `${host} ${actor}`;
      if (!this.lanes.has(key)) this.lanes.set(key, { host, actor, stretches: [] });
      const kept = this.lanes.get(key).stretches;
      for (const [activity, from, to] of stretches) {
        const last = kept.findLast((each) => each[0] === activity);
        if (last && from - last[2] <= TOUCHING && from >= last[1]) last[2] = Math.max(last[2], to);
        else kept.push([activity, from, to]);
      }
    }
    for (const lane of this.lanes.values()) lane.stretches = lane.stretches.filter((each) => each[2] > this.now - KEPT);
  }

  /** A message of the feed, or about the run's files. */
  hear(message) {
    const { kind } = message, { state } = this;
    if (kind === "rows") this.add(message.rows);
    else if (kind === "explained") this.explained(message.rows);
    else if (kind === "alarms") state.alarms = [...(state.alarms ?? []), ...message.rows];
    else if (kind === "answers") this.answered(message.steps);
    else if (kind === "roles" || kind === "status" || kind === "moment") this[kind] = message;
    else if (kind === "lanes") this.did(message);
  }

  explained(lines) {
    const { state } = this;
    state.sentences = [...(state.sentences ?? []), ...lines].slice(-200);
    const causes = new Map((state.causes ?? []).map((each) => [each.cause, each]));
    for (const line of lines.filter((each) => each.cause && each.cause !== "none")) {
      const one = causes.get(line.cause) ?? { cause: line.cause, steps: 0, seconds: 0, change: null, saves: 0 };
      const advice = line.change ? { change: line.change, saves: line.saves } : {};
      causes.set(line.cause, { ...one, steps: one.steps + 1, seconds: one.seconds + (line.seconds ?? 0), text: line.text, ...advice });
    }
    state.causes = [...causes.values()].sort((one, other) => other.seconds - one.seconds);
  }

  answered(steps) {
    const told = (this.state.answers ??= { steps: [], shown: {} });
    told.steps = [...new Set([...told.steps, ...steps])].sort((one, other) => one - other);
    for (const step of steps) this.rows.delete(step);
  }
}

/** What is shown: all runs, those whose curves are drawn, and the one whose details are. */
const board = {
  live: false,
  runs: [],
  shown: new Set(),
  focus: null,
  get drawn() { return this.runs.filter((run) => this.shown.has(run.id)); },
  get(id) { return this.runs.find((run) => run.id === id); },
};
