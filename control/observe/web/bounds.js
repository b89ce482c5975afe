// How long a call may run before it is shown as slow (amber), or as one that hangs (red).

import { recall, remember } from "./dom.js";

// An endpoint that is known to take long gets more time: a multiple of its 99th percentile, after enough calls.
const KNOWN_CALLS = 20;
const SLOW_TIMES = 2;
const HUNG_TIMES = 4;

export const LEVELS = ["", "slow", "hung"];

export class CallBounds {
  #inputs;
  #served = { slow: 30, hung: 120 };

  /** @param inputs the fields for seconds, `slow` and `hung`; what is written there counts on this browser. */
  constructor(inputs, changed) {
    this.#inputs = inputs;
    for (const [name, input] of Object.entries(inputs)) {
      input.value = recall(name) ?? "";
      input.addEventListener("change", () => {
        const isGiven = input.value !== "" && input.valueAsNumber > 0;
        if (!isGiven) input.value = "";
        remember(name, isGiven ? input.value : null);
        changed();
      });
    }
  }

  /** Take what the server's own bounds are. */
  take(look) {
    if (look.slow_after_s !== undefined) this.#served = { slow: look.slow_after_s, hung: look.hung_after_s };
    for (const [name, input] of Object.entries(this.#inputs)) input.placeholder = this.#served[name];
  }

  /**
   * Say of an actor which of its calls runs too long: [level, endpoint, seconds], or null.
   * One that is parked in a debugger waits for people.
   */
  judge(actor) {
    if (actor.state === "parked") return null;
    let worst = null;
    for (const [endpoint, seconds] of actor.doing) {
      const known = actor.latencies.find(([name, calls]) => name === endpoint && calls >= KNOWN_CALLS);
      const usual = known === undefined ? 0 : known[3];
      let level = 0;
      if (seconds > Math.max(this.#seconds("slow"), SLOW_TIMES * usual)) level = 1;
      if (seconds > Math.max(this.#seconds("hung"), HUNG_TIMES * usual)) level = 2;
      if (level > 0 && (worst === null || level > worst[0])) worst = [level, endpoint, seconds];
    }
    return worst;
  }

  #seconds(name) {
    const input = this.#inputs[name];
    return input.value === "" ? this.#served[name] : input.valueAsNumber;
  }
}
