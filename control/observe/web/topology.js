// Hosts, their processes, and their actors, as one table. Rows are kept from look to look: only what changes is touched.

import { LEVELS } from "./bounds.js";
import { bytes, count, counted, duration, rate } from "./format.js";
import { element, setAttribute, setText } from "./dom.js";
import { pathOf } from "./paths.js";

// Name, what it is called in the head, whether it gives way on small screens.
const COLUMNS = [
  ["name", "Process / actor", false],
  ["pid", "pid", true],
  ["state", "State", false],
  ["queue", "Queue", false],
  ["calls", "Calls/s", false],
  ["done", "Done", true],
  ["errors", "Errors", false],
  ["restarts", "Restarts", false],
  ["cpu", "CPU", false],
  ["memory", "Memory", false],
  ["moved", "Moved/s", false],
  ["flight", "In flight", true],
];
const TEXTS = new Set(["name", "state"]);

export class Topology {
  #rows = new Map();
  #body = element("tbody", { role: "rowgroup" });
  #filter = "";
  #empty;
  #bounds;

  constructor(table, filter, empty, bounds) {
    this.#empty = empty;
    this.#bounds = bounds;
    const head = element("tr", { role: "row" });
    for (const [name, title, minor] of COLUMNS) {
      const cell = element("th", { scope: "col", role: "columnheader", class: classOf(name, minor) });
      setText(cell, title);
      head.append(cell);
    }
    const thead = element("thead", { role: "rowgroup" });
    thead.append(head);
    table.append(thead, this.#body);
    filter.addEventListener("input", () => {
      this.#filter = filter.value.trim().toLowerCase();
      this.#show();
    });
  }

  /** Show what a look has found. */
  update(look) {
    const order = [];
    for (const [host, processes] of byHost(look.processes)) {
      order.push(this.#host(host, processes));
      for (const process of processes) {
        order.push(this.#process(process));
        for (const actor of process.actors ?? []) order.push(this.#actor(actor, process));
      }
    }
    const keys = new Set(order.map((row) => row.key));
    for (const [key, row] of this.#rows) {
      if (!keys.has(key)) {
        row.element.remove();
        this.#rows.delete(key);
      }
    }
    order.forEach((row, place) => {
      if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] ?? null);
    });
    this.#show();
  }

  #host(name, processes) {
    const row = this.#row(`host ${name}`, "host", () => {
      const cell = element("th", { colspan: COLUMNS.length, scope: "rowgroup", role: "cell" });
      cell.append(element("span"), element("span", { class: "quiet" }));
      return { name: cell };
    });
    const [title, summary] = row.cells.name.children;
    const silent = processes.filter((process) => process.state === "silent").length;
    setText(title, name || "host unknown");
    const up = processes.filter((process) => process.actors !== undefined);
    const [cpu, memory] = ["cpu", "rss_nbytes"].map((figure) => up.reduce((sum, process) => sum + process[figure], 0));
    const figures = [counted(processes.length, "process", "processes"), `${(100 * cpu).toFixed(0)} % of a CPU`, `${bytes(memory)} of memory`];
    if (silent) figures.splice(1, 0, `${silent} silent`);
    setText(summary, figures.join(", "));
    row.words = "";
    return row;
  }

  #process(process) {
    const { cells, ...row } = this.#line(`process ${process.id}`, "process", process.level);
    const isUp = process.actors !== undefined;
    setLink(cells.name, process.name, pathOf(process));
    setText(cells.name.querySelector(".problem"), process.state === "silent" ? process.problem : "");
    setState(cells.state, process.state, process.state);
    setText(cells.pid, process.pid ?? "");
    setText(cells.restarts, process.restarts || "");
    setText(cells.calls, isUp && process.actors.length > 1 ? rate(process.calls) : "");
    setText(cells.errors, process.errors || "");
    setText(cells.cpu, isUp ? `${(100 * process.cpu).toFixed(0)} %` : "");
    setText(cells.memory, isUp ? bytes(process.rss_nbytes) : "");
    if (process.transfers) setFigure(cells.moved, process.moved, bytes);
    else setText(cells.moved, "");
    setText(cells.flight, process.transfers?.in_flight || "");
    setAttribute(row.element, "class", process.state === "silent" ? "process silent-row" : "process");
    return this.#worded(row.key, `${process.name} ${process.state} ${process.pid} ${process.host}`);
  }

  #actor(actor, process) {
    const { cells, key } = this.#line(`actor ${process.id} ${actor.id}`, "actor", process.level);
    setLink(cells.name, actor.class ? `${actor.label} · ${actor.class}` : actor.label, pathOf(process, actor));
    const judged = this.#bounds.judge(actor);
    setState(cells.state, actor.state, judged === null ? doing(actor) : `${doing(actor)} · ${judged[0] === 2 ? "hangs?" : "slow"}`);
    setAttribute(cells.state.firstElementChild, "data-level", LEVELS[judged?.[0] ?? 0]);
    setFigure(cells.queue, actor.queued, count);
    setFigure(cells.calls, actor.calls, rate);
    setFigure(cells.done, actor.handled, count);
    setText(cells.errors, actor.errors || "");
    return this.#worded(key, `${actor.label} ${actor.class} ${actor.state} ${LEVELS[judged?.[0] ?? 0]} ${process.name}`);
  }

  #line(key, kind, level) {
    const row = this.#row(key, kind, () => {
      const cells = {};
      for (const [name, title, minor] of COLUMNS) {
        const isName = name === "name";
        const cell = element(isName ? "th" : "td", { class: classOf(name, minor), role: isName ? "rowheader" : "cell" });
        if (isName) {
          setAttribute(cell, "scope", "row");
          cell.append(element("a", { class: "name" }), element("span", { class: "problem" }));
        } else if (name === "state") cell.append(element("span", { class: "state" }));
        else setAttribute(cell, "data-label", title.toLowerCase());
        if (name === "errors") cell.classList.add("some");
        cells[name] = cell;
      }
      return cells;
    });
    row.element.style.setProperty("--level", level);
    return row;
  }

  #row(key, kind, build) {
    let row = this.#rows.get(key);
    if (row === undefined) {
      const line = element("tr", { class: kind, role: "row" });
      const cells = build();
      line.append(...Object.values(cells));
      row = { key, element: line, cells, words: "" };
      this.#rows.set(key, row);
    }
    return row;
  }

  #worded(key, words) {
    const row = this.#rows.get(key);
    row.words = words.toLowerCase();
    return row;
  }

  #show() {
    let isAny = this.#filter === "" || this.#rows.size === 0;
    for (const row of this.#rows.values()) {
      const isShown = this.#filter === "" || row.words.includes(this.#filter);
      isAny ||= isShown;
      if (row.element.hidden === isShown) row.element.hidden = !isShown;
    }
    this.#empty.hidden = isAny;
  }
}

/** Processes by host, in the order in which hosts appear; each with its depth below the script. */
function byHost(processes) {
  const levels = new Map();
  const hosts = new Map();
  for (const process of processes) {
    const parent = levels.get(process.parent);
    const level = parent === undefined ? 0 : parent.host === process.host ? parent.level + 1 : 0;
    levels.set(process.id, { level, host: process.host });
    process.level = level;
    if (!hosts.has(process.host)) hosts.set(process.host, []);
    hosts.get(process.host).push(process);
  }
  return hosts;
}

/** What an actor is at, in words. */
export function doing(actor) {
  if (actor.doing.length === 0) return actor.state;
  const [endpoint, since] = actor.doing.reduce((longest, other) => (other[1] > longest[1] ? other : longest));
  const others = actor.doing.length > 1 ? ` +${actor.doing.length - 1}` : "";
  return `${actor.state} ${endpoint}${others} · ${duration(since)}`;
}

function classOf(name, minor) {
  return [TEXTS.has(name) ? "" : "number", minor ? "minor" : ""].join(" ").trim();
}

/** Nothing to see where there is nothing: zeros stand back. */
function setFigure(cell, value, show) {
  setText(cell, value === 0 ? "0" : show(value));
  cell.classList.toggle("zero", value === 0);
}

function setLink(cell, text, path) {
  const link = cell.querySelector(".name");
  setText(link, text);
  setAttribute(link, "href", path);
}

function setState(cell, state, text) {
  const mark = cell.firstElementChild;
  setAttribute(mark, "data-state", state);
  setText(mark, text);
}
