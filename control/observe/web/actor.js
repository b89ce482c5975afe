// The page of one actor, or of one process: what it does, how long that takes, what went wrong, where it is, what it says.

import { LEVELS } from "./bounds.js";
import { Chart } from "./charts.js";
import { ask, element, setAttribute, setText } from "./dom.js";
import { ErrorItem, total } from "./errors.js";
import { bytes, clock, count, counted, duration, rate, span } from "./format.js";
import { LogView } from "./logs.js";
import { logsPath, meshAndRank, pathOf, wordOf } from "./paths.js";
import { doing } from "./topology.js";

const STACKS_PATIENCE_MS = 40000;
const BUSY_MS = 1000;

export class Part {
  #place;
  #model;
  #bounds;
  #about = null;
  #parts = null;
  #known = null;
  #logs = null;

  constructor(place, model, bounds) {
    this.#place = place;
    this.#model = model;
    this.#bounds = bounds;
  }

  /** Show the page of a process' id, or of that and an actor's; null: no page. */
  open(about) {
    this.#logs?.close();
    this.#logs = null;
    this.#about = about;
    this.#known = null;
    this.#parts = null;
    this.#place.replaceChildren();
  }

  /** Show what a look has found. */
  update(look) {
    const [processId, actorId] = this.#about;
    const process = look.processes.find((each) => each.id === processId);
    const actor = process?.actors?.find((each) => each.id === actorId);
    const isThere = process !== undefined && (actorId === undefined || actor !== undefined || process.actors === undefined);
    if (isThere) this.#known = { process, actor: actor ?? this.#known?.actor };
    if (this.#known === null) {
      this.#place.replaceChildren(gone("There is no such process or actor, or it has ended.", look, null));
      return;
    }
    if (this.#parts === null) this.#build(actorId !== undefined);
    this.#show(look, isThere);
  }

  #build(isActor) {
    const [title, state, problem] = [element("h2"), element("span", { class: "state" }), element("p", { class: "problem" })];
    const head = element("header", { class: "part-head card" }, element("a", { href: "#/" }, "← all"), title, state, problem);
    const facts = element("dl", { class: "facts card" });
    const charts = isActor
      ? [new Chart("calls", "Calls handled", rate, "/s"), new Chart("queued", "Waiting in its queue", count, ""), new Chart("running", "Longest call under way", duration, "")]
      : [];
    const tiles = element("ul", { class: "tiles" }, ...charts.map((chart) => chart.element));
    const latencies = element("tbody");
    const errors = element("ol", { class: "groups" });
    const deaths = element("ol", { class: "events" });
    const stacks = this.#stacksCard();
    const output = element("section", { class: "card", "aria-label": "Output" });
    const { process } = this.#known;
    const who = wordOf(...meshAndRank(process.name));
    const all = element("a", { href: logsPath(who) }, "filter, and all of it");
    output.append(element("div", { class: "card-head" }, element("h2", {}, "Output"), all));
    this.#logs = new LogView(output, process.pid === null ? who : String(process.pid), { isShort: true });
    this.#parts = { title, state, problem, facts, charts, latencies, errors, deaths, errorsKnown: -1 };
    this.#place.replaceChildren(
      head,
      facts,
      ...(isActor ? [tiles, card("Time of calls", latencyTable(latencies))] : []),
      stacks,
      card("Errors", errors),
      card("Deaths and restarts", deaths),
      output,
    );
  }

  #show(look, isThere) {
    const { process, actor } = this.#known;
    const parts = this.#parts;
    setText(parts.title, actor === undefined ? process.name : `${actor.label} · ${actor.class}`);
    const judged = isThere && actor !== undefined ? this.#bounds.judge(actor) : null;
    const state = !isThere ? "ended" : actor === undefined || process.state === "silent" ? process.state : actor.state;
    setAttribute(parts.state, "data-state", state);
    setAttribute(parts.state, "data-level", LEVELS[judged?.[0] ?? 0]);
    setText(parts.state, state + (judged === null ? "" : judged[0] === 2 ? " · hangs?" : " · slow"));
    if (isThere) setText(parts.problem, process.state === "silent" ? process.problem : "");
    else parts.problem.replaceChildren(...gone("It has ended.", look, this.#known).childNodes);
    showFacts(parts.facts, process, actor, look);
    const series = actor === undefined ? undefined : this.#model.seriesOf(actor);
    if (series !== undefined) for (const chart of parts.charts) chart.update(series.times, series.samples[chart.element.dataset.name]);
    if (actor !== undefined) showLatencies(parts.latencies, actor.latencies);
    showDeaths(parts.deaths, process, look);
    const errors = actor === undefined ? process.errors : actor.errors;
    if (errors !== undefined && errors !== parts.errorsKnown) {
      parts.errorsKnown = errors;
      this.#fetchErrors(parts, process, actor, errors);
    }
  }

  async #fetchErrors(parts, process, actor, count) {
    try {
      const found = await ask("errors.json", { process: process.id });
      if (found.problem) throw new Error(found.problem);
      const groups = found.groups.filter((group) => actor === undefined || group.who.startsWith(`${actor.label}.`));
      showErrors(parts.errors, groups, count);
    } catch (error) {
      parts.errorsKnown = -1;
      parts.errors.replaceChildren(element("li", { class: "empty" }, `Cannot read the errors: ${error.message}`));
    }
  }

  #stacksCard() {
    const button = element("button", { type: "button", class: "action" }, "Take stacks");
    const said = element("span", { class: "quiet", role: "status" });
    const text = element("pre", { class: "stacks", tabindex: "0", "aria-label": "Stacks", hidden: "" });
    button.addEventListener("click", async () => {
      button.disabled = true;
      setText(said, "asking; a process that hangs is inspected from outside, which takes a while");
      const { process } = this.#known;
      try {
        const found = await takeStacks(process);
        setText(text, found);
        text.hidden = false;
        setText(said, `as of ${clock(Date.now() / 1000)}`);
      } catch (error) {
        setText(said, `There are no stacks: ${error.message}`);
      }
      button.disabled = false;
    });
    const section = element("section", { class: "card", "aria-label": "Stacks" });
    section.append(element("div", { class: "card-head" }, element("h2", {}, "Where its threads are"), said, button), text);
    return section;
  }
}

async function takeStacks(process) {
  for (;;) {
    const found = await ask("stacks.json", { name: process.name, pid: process.pid ?? 0 }, STACKS_PATIENCE_MS);
    if (found.problem) throw new Error(found.problem);
    if (!found.busy) return found.text;
    await new Promise((later) => setTimeout(later, BUSY_MS)); // somebody else looks
  }
}

/** That something is no more, and where what came in its place is. */
function gone(words, look, known) {
  const next = known === null ? undefined : look.processes.find((each) => each.name === known.process.name && each.id !== known.process.id);
  const said = element("p", { class: "empty" }, `${words} `);
  if (next !== undefined) {
    const actor = next.actors?.find((each) => each.label === known.actor?.label);
    said.append(element("a", { href: pathOf(next, actor) }, "Another process of this name is running."));
  }
  return said;
}

function card(title, content) {
  return element("section", { class: "card", "aria-label": title }, element("div", { class: "card-head" }, element("h2", {}, title)), content);
}

function showFacts(list, process, actor, look) {
  const facts = [];
  if (actor !== undefined) {
    facts.push(["Now", doing(actor)], ["In its queue", count(actor.queued)], ["Calls handled", count(actor.handled)], ["Errors", count(actor.errors)]);
    facts.push(["Process", element("a", { href: pathOf(process) }, process.name)]);
  }
  facts.push(["pid", process.pid ?? "unknown"], ["Host", process.host || "unknown"], ["Restarts", count(process.restarts)]);
  if (process.rss_nbytes !== undefined) {
    facts.push(["CPU", `${(100 * (process.cpu ?? 0)).toFixed(0)} %`], ["Memory", bytes(process.rss_nbytes)]);
    facts.push(["Up", duration(look.taken_s - process.started_s)]);
  }
  if (process.transfers) {
    const { in_flight: inFlight, failed, read_nbytes: read, written_nbytes: written } = process.transfers;
    facts.push(["Data plane", `${bytes(read)} read, ${bytes(written)} written, ${inFlight} in flight, ${failed} failed`]);
  }
  if (actor === undefined) {
    const links = (process.actors ?? []).flatMap((each, place) => [place === 0 ? "" : ", ", element("a", { href: pathOf(process, each) }, each.label)]);
    if (links.length > 0) facts.push(["Actors", element("span", {}, ...links)]);
  }
  // Links stay the same elements as long as they say the same, so that they can be pressed.
  const text = facts.map(([name, value]) => `${name}: ${value.outerHTML ?? value}`);
  facts.forEach(([name, value], place) => {
    const known = list.children[place];
    if (known?.dataset.text === text[place]) return;
    const made = element("div", {}, element("dt", {}, name), element("dd", {}, value));
    made.dataset.text = text[place];
    if (known === undefined) list.append(made);
    else known.replaceWith(made);
  });
  while (list.children.length > facts.length) list.lastElementChild.remove();
}

function latencyTable(body) {
  const names = ["Endpoint", "Latest calls", "p50", "p99", "Longest"];
  const head = element("tr", {}, ...names.map((name, place) => element("th", { scope: "col", class: place === 0 ? "" : "number" }, name)));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Time of calls" }, element("table", {}, element("thead", {}, head), body));
}

function showLatencies(body, latencies) {
  const rows = latencies.map(([endpoint, calls, p50, p99, max]) => {
    const row = element("tr", { "data-endpoint": endpoint }, element("th", { scope: "row" }, endpoint));
    for (const text of [count(calls), span(p50), span(p99), span(max)]) row.append(element("td", { class: "number" }, text));
    return row;
  });
  if (rows.length === 0) rows.push(element("tr", {}, element("td", { colspan: "5", class: "empty" }, "No call has ended yet.")));
  body.replaceChildren(...rows);
}

function showErrors(list, groups, count) {
  const shown = groups.map((group) => new ErrorItem(group).element);
  const seen = total(groups);
  if (shown.length === 0) shown.push(element("li", { class: "empty" }, count === 0 ? "None so far." : `The traceback of ${counted(count, "error")} is no longer kept.`));
  else if (seen < count) shown.push(element("li", { class: "empty" }, `${counted(count - seen, "error")} of other kinds before these.`));
  list.replaceChildren(...shown);
}

function showDeaths(list, process, look) {
  const deaths = look.events.filter((event) => event.kind === "death" && event.who === process.name);
  const key = JSON.stringify([deaths.length, deaths[0]?.at_s, process.restarts]);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const shown = deaths.map((death) => {
    const when = element("time", { datetime: new Date(death.at_s * 1000).toISOString() }, clock(death.at_s));
    const head = element("p", { class: "event-head" }, element("span", { class: "event-kind" }, "✕ died"), when);
    return element("li", { class: "event", "data-kind": "death" }, head, element("p", { class: "event-message" }, death.message));
  });
  if (shown.length === 0) {
    const words = process.restarts > 0 ? `${counted(process.restarts, "process", "processes")} of this name died; the reasons are no longer kept.` : "None.";
    shown.push(element("li", { class: "empty" }, words));
  }
  list.replaceChildren(...shown);
}
