// The overview's other parts.

import { Chart } from "./charts.js";
import { element, setText } from "./dom.js";
import { bytes, clock, count, counted, duration, rate } from "./format.js";

// Of the totals: what it is called, how it is shown, and of what.
const TILES = [
  ["calls", "Calls handled", rate, "/s"],
  ["messages", "Messages", rate, "/s"],
  ["moved", "Data plane", bytes, "/s"],
  ["queued", "Waiting in queues", count, ""],
  ["cpu", "CPU", (cores) => (100 * cores).toFixed(0), " %"],
  ["memory", "Memory", bytes, ""],
];

export class Tiles {
  #charts = TILES.map(([name, title, show, unit]) => new Chart(name, title, show, unit));

  constructor(list) {
    list.append(...this.#charts.map((chart) => chart.element));
  }

  update(series) {
    for (const [place, [name]] of TILES.entries()) this.#charts[place].update(series.times, series.samples[name]);
  }
}

/** Errors and deaths, the newest first. */
export class Events {
  #shown = new Map();
  #list;
  #empty;
  #isFirst = true;

  constructor(list, empty) {
    this.#list = list;
    this.#empty = empty;
  }

  update(look) {
    const keys = new Set();
    for (const [place, event] of look.events.entries()) {
      const key = JSON.stringify([event.kind, event.at_s, event.who, event.message]);
      keys.add(key);
      let item = this.#shown.get(key);
      if (item === undefined) {
        item = this.#item(event);
        this.#shown.set(key, item);
      }
      if (this.#list.children[place] !== item) this.#list.insertBefore(item, this.#list.children[place] ?? null);
      setText(item.querySelector("time"), `${clock(event.at_s)} · ${duration(look.taken_s - event.at_s)} ago`);
    }
    for (const [key, item] of this.#shown) {
      if (!keys.has(key)) {
        item.remove();
        this.#shown.delete(key);
      }
    }
    this.#empty.hidden = look.events.length > 0;
    this.#isFirst = false;
  }

  #item(event) {
    const item = element("li", { class: this.#isFirst ? "event" : "event fresh", "data-kind": event.kind });
    const head = element("p", { class: "event-head" });
    const kind = element("span", { class: "event-kind" });
    const who = element("p", { class: "event-who" });
    const message = element("p", { class: "event-message", tabindex: "0" });
    setText(kind, event.kind === "death" ? "✕ died" : "! error");
    head.append(kind, element("time", { datetime: new Date(event.at_s * 1000).toISOString() }));
    setText(who, event.who);
    setText(message, event.message);
    item.append(head, who, message);
    return item;
  }
}

/** Tables that parts of the job report, those of one title in one. They are small: made anew where they change. */
export class Tables {
  #cards = new Map();
  #place;

  constructor(place) {
    this.#place = place;
  }

  update(tables) {
    const byTitle = new Map();
    for (const table of tables) {
      const known = byTitle.get(table.title);
      if (known === undefined) byTitle.set(table.title, { ...table, rows: [...table.rows] });
      else {
        known.rows.push(...table.rows);
        known.left_out += table.left_out;
      }
    }
    for (const [title, card] of this.#cards) {
      if (!byTitle.has(title)) {
        card.element.remove();
        this.#cards.delete(title);
      }
    }
    for (const [title, table] of byTitle) {
      const text = JSON.stringify(table);
      const card = this.#cards.get(title);
      if (card?.text === text) continue;
      const made = tableCard(table);
      if (card === undefined) this.#place.append(made);
      else card.element.replaceWith(made);
      this.#cards.set(title, { element: made, text });
    }
  }
}

function tableCard({ title, columns, rows, left_out: leftOut }) {
  const card = element("section", { class: "card", "aria-label": title });
  const head = element("div", { class: "card-head" });
  const heading = element("h2");
  const wide = element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title });
  const table = element("table");
  const numeric = columns.map((_, place) => rows.length > 0 && rows.every((row) => row[place] === null || typeof row[place] === "number"));
  setText(heading, title);
  head.append(heading);
  table.append(element("thead"), element("tbody"));
  table.tHead.append(line("th", columns, columns, numeric));
  for (const row of rows) table.tBodies[0].append(line("td", row, columns, numeric));
  wide.append(table);
  card.append(head, wide);
  if (rows.length === 0 || leftOut > 0) {
    const note = element("p", { class: "empty" });
    setText(note, leftOut > 0 ? `${counted(leftOut, "row")} more` : "Nothing yet.");
    card.append(note);
  }
  return card;
}

function line(kind, entries, columns, numeric) {
  const row = element("tr");
  entries.forEach((entry, place) => {
    const cell = element(kind, numeric[place] ? { class: "number" } : {});
    const isSize = columns[place].endsWith("bytes");
    if (entry === null) setText(cell, "–");
    else if (typeof entry !== "number") setText(cell, entry);
    else setText(cell, isSize ? bytes(entry) : count(entry));
    row.append(cell);
  });
  return row;
}

/** Figures that parts of processes report. */
export function showFigures(card, place, processes) {
  const blocks = [];
  for (const process of processes) {
    for (const [part, figures] of Object.entries(process.figures ?? {})) {
      const block = element("div");
      const heading = element("h3");
      const list = element("dl");
      setText(heading, `${part} · ${process.name}`);
      for (const [name, value] of Object.entries(figures)) {
        const figure = element("div", { class: "figure" });
        const [term, number] = [element("dt"), element("dd")];
        setText(term, name);
        setText(number, name.endsWith("bytes") ? bytes(value) : count(value));
        figure.append(term, number);
        list.append(figure);
      }
      block.append(heading, list);
      blocks.push(block);
    }
  }
  card.hidden = blocks.length === 0;
  place.replaceChildren(...blocks);
}
