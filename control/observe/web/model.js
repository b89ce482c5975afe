// What follows from one look after the other: rates, and what each figure was at the last ones.

const KEPT = 3600;
const KEPT_OF_ACTORS = 600;
const MOST_ACTORS = 400;

/** Turns counters into rates. A counter that goes back belongs to something new. */
class Rates {
  #known = new Map();

  /** How much a counter has grown per second since it was last seen; 0 the first time. */
  of(key, value, now) {
    const before = this.#known.get(key);
    if (before !== undefined && before.at === now) return before.rate;
    let rate = 0;
    if (before !== undefined && value >= before.value) rate = (value - before.value) / (now - before.at);
    this.#known.set(key, { value, at: now, rate });
    return rate;
  }

  /** Forget what was not seen for a while, such as of processes that have ended. */
  forget(before) {
    for (const [key, known] of this.#known) if (known.at < before) this.#known.delete(key);
  }
}

/** Figures by name, and when they were taken, the newest last; their number is limited. */
export class Series {
  times = [];
  samples = {};
  #kept;

  constructor(kept) {
    this.#kept = kept;
  }

  add(at, figures) {
    this.times.push(at);
    if (this.times.length > this.#kept) this.times.shift();
    for (const [name, value] of Object.entries(figures)) {
      const samples = (this.samples[name] ??= []);
      samples.push(value);
      if (samples.length > this.#kept) samples.shift();
    }
  }
}

export class Model {
  #rates = new Rates();
  #ofActors = new Map();

  /** Each total at the last looks. */
  totals = new Series(KEPT);

  /**
   * Take a look in: adds rates to its processes and actors, and totals to itself.
   * @returns {boolean} whether it is a new one.
   */
  take(look) {
    if (look.taken_s === undefined || look.taken_s === this.taken) return false;
    this.taken = look.taken_s;
    const totals = { calls: 0, messages: 0, moved: 0, queued: 0, cpu: 0, memory: 0, actors: 0, inFlight: 0, silent: 0, errors: 0 };
    for (const process of look.processes) this.#process(process, look.taken_s, totals);
    this.#rates.forget(look.taken_s - 60);
    this.totals.add(look.taken_s, totals);
    for (const [key, series] of this.#ofActors) if (series.times.at(-1) < look.taken_s - 60) this.#ofActors.delete(key);
    look.totals = totals;
    return true;
  }

  /** The figures of an actor at the last looks, or undefined: where there are very many actors, not all are kept. */
  seriesOf(actor) {
    return this.#ofActors.get(actor.id);
  }

  #process(process, now, totals) {
    if (process.state === "silent") totals.silent += 1;
    if (process.actors === undefined) return;
    const { id, transfers } = process;
    process.cpu = this.#rates.of(`${id} cpu`, process.cpu_s, now);
    process.messages = this.#rates.of(`${id} messages`, process.heard_messages, now);
    process.calls = 0;
    process.moved = 0;
    if (transfers) {
      process.moved = this.#rates.of(`${id} moved`, transfers.read_nbytes + transfers.written_nbytes, now);
      totals.inFlight += transfers.in_flight;
    }
    for (const actor of process.actors) {
      actor.calls = this.#rates.of(`${actor.id} calls`, actor.handled, now);
      process.calls += actor.calls;
      totals.queued += actor.queued;
      this.#sample(actor, now);
    }
    totals.errors += process.errors;
    totals.actors += process.actors.length;
    totals.memory += process.rss_nbytes;
    for (const name of ["calls", "messages", "moved", "cpu"]) totals[name] += process[name];
  }

  #sample(actor, now) {
    let series = this.#ofActors.get(actor.id);
    if (series === undefined) {
      if (this.#ofActors.size >= MOST_ACTORS) return;
      series = new Series(KEPT_OF_ACTORS);
      this.#ofActors.set(actor.id, series);
    }
    const running = actor.doing.reduce((most, [, seconds]) => Math.max(most, seconds), 0);
    series.add(now, { calls: actor.calls, queued: actor.queued, running });
  }
}
