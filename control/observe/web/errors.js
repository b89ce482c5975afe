// Errors that are alike, counted, with the traceback of the first; on the overview together with deaths.

import { ask, element, setText } from "./dom.js";
import { clock, counted, duration } from "./format.js";

const MOST_NAMED = 3;
const ASKED_FOR_S = 10; // an error of a process that ended before it was asked never comes

/** An item of a list: errors of one kind, of one actor or of several. */
export class ErrorItem {
  #times = element("span", { class: "times" });
  #when = element("time");
  #who = element("p", { class: "event-who" });
  #message = element("p", { class: "event-message", tabindex: "0" });

  constructor(group) {
    const head = element("p", { class: "event-head" }, element("span", { class: "event-kind" }, "! error"), this.#times, this.#when);
    const summary = element("summary", {}, `Traceback of the first${group.place ? `, at ${group.place}` : ""}`);
    const trace = element("details", {}, summary, element("pre", { class: "stacks", tabindex: "0" }, group.traceback));
    this.element = element("li", { class: "event", "data-kind": "error", "data-error": group.error }, head, this.#who, this.#message, trace);
    this.update(group);
  }

  update(group, now = null) {
    const span = group.count === 1 ? clock(group.last_s) : `${clock(group.first_s)} to ${clock(group.last_s)}`;
    setText(this.#times, `×${group.count}`);
    setText(this.#when, now === null ? span : `${span} · ${duration(now - group.last_s)} ago`);
    this.#when.setAttribute("datetime", new Date(group.last_s * 1000).toISOString());
    setText(this.#who, whose(group));
    setText(this.#message, group.message);
  }
}

/** An item that shows one event, as a status has it. */
class EventItem {
  #when;

  constructor(event) {
    this.#when = element("time", { datetime: new Date(event.at_s * 1000).toISOString() });
    const kind = element("span", { class: "event-kind" }, event.kind === "death" ? "✕ died" : "! error");
    const head = element("p", { class: "event-head" }, kind, this.#when);
    const message = element("p", { class: "event-message", tabindex: "0" }, event.message);
    this.element = element("li", { class: "event", "data-kind": event.kind }, head, element("p", { class: "event-who" }, event.who), message);
  }

  update(event, now) {
    setText(this.#when, `${clock(event.at_s)} · ${duration(now - event.at_s)} ago`);
  }
}

/**
 * Errors of the whole job by kind, and deaths, the latest first. An error whose kind is not known, such as of a process
 * that ended before it was asked, is shown by itself.
 */
export class Faults {
  #shown = new Map();
  #groups = [];
  #known = "";
  #askedAt = 0;
  #askUntil = 0;
  #list;
  #empty;
  #redraw;
  #isFirst = true;

  /** @param redraw called when there is more to show than at the last look */
  constructor(list, empty, redraw) {
    this.#list = list;
    this.#empty = empty;
    this.#redraw = redraw;
  }

  update(look) {
    this.#ask(look);
    const groups = this.#groups.map((group) => [`group ${group.error} ${group.place} ${group.traceback}`, group.last_s, ErrorItem, group]);
    const events = look.events.filter((event) => event.kind === "death" || !this.#groups.some((group) => isIn(event, group)));
    const single = events.map((event) => [JSON.stringify([event.kind, event.at_s, event.who, event.message]), event.at_s, EventItem, event]);
    const all = [...groups, ...single].sort((one, other) => other[1] - one[1]);
    for (const [place, [key, , kind, content]] of all.entries()) {
      if (!this.#shown.has(key)) {
        this.#shown.set(key, new kind(content));
        if (!this.#isFirst) this.#shown.get(key).element.classList.add("fresh");
      }
      const item = this.#shown.get(key);
      item.update(content, look.taken_s);
      if (this.#list.children[place] !== item.element) this.#list.insertBefore(item.element, this.#list.children[place] ?? null);
    }
    this.#forget(new Set(all.map(([key]) => key)));
    this.#empty.hidden = all.length > 0;
    this.#isFirst = false;
  }

  #forget(keys) {
    for (const [key, item] of this.#shown) {
      if (!keys.has(key)) {
        item.element.remove();
        this.#shown.delete(key);
      }
    }
  }

  /** Ask for the kinds when errors have come, and again at the next looks while the answer is older than they are. */
  async #ask({ totals: { errors }, events, taken_s: taken }) {
    const state = `${errors} ${events.length} ${events[0]?.at_s}`;
    if (state !== this.#known) this.#askUntil = taken + ASKED_FOR_S;
    if (events.length === 0 || taken === this.#askedAt || taken > this.#askUntil) return;
    this.#known = state;
    this.#askedAt = taken;
    try {
      const found = await ask("errors.json");
      if (found.problem) return;
      if (state === this.#known && hasAll(found.groups, errors, events)) this.#askUntil = 0;
      this.#groups = found.groups;
      this.#redraw();
    } catch {
      this.#askUntil = 0; // who may not see tracebacks sees the events
    }
  }
}

/** Whether groups, those seen last first, are as new as the events of a look, newest first, and stand for all errors. */
function hasAll(groups, errors, events) {
  const newest = events.find((event) => event.kind === "error");
  return total(groups) >= errors && (newest === undefined || groups[0]?.last_s >= newest.at_s);
}

/** How many errors groups stand for. */
export function total(groups) {
  return groups.reduce((sum, group) => sum + group.count, 0);
}

function isIn(event, group) {
  const isMeant = group.who.includes(event.who) || group.who.length < group.who_total;
  return isMeant && group.first_s <= event.at_s && event.at_s <= group.last_s;
}

/** The actors and endpoints of a group, one or several; there may be more than are named. */
function whose({ who, who_total: total }) {
  if (typeof who === "string") return who;
  const rest = total - MOST_NAMED;
  return who.slice(0, MOST_NAMED).join(", ") + (rest > 0 ? ` and ${counted(rest, "other")}` : "");
}
