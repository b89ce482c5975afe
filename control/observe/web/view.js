// The overview's other parts.

import { Chart } from "./charts.js";
import { element, setText } from "./dom.js";
import { bytes, count, counted, rate } from "./format.js";

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

/** What parts of the job report under one title. It is small, so it is rebuilt when it changes. */
export class TableCard {
  element = element("section", { class: "card" });
  #title;
  #known = "";

  constructor(title) {
    this.#title = title;
    this.element.setAttribute("aria-label", title);
  }

  /** Show tables of the same columns as one. */
  update(tables) {
    const rows = tables.flatMap((table) => table.rows);
    const leftOut = tables.reduce((sum, table) => sum + table.left_out, 0);
    const { columns } = tables[0];
    const text = JSON.stringify([columns, rows, leftOut]);
    if (text === this.#known) return;
    this.#known = text;
    const numeric = columns.map((_, place) => rows.length > 0 && rows.every((row) => row[place] === null || typeof row[place] === "number"));
    const table = element("table", {}, element("thead", {}, line("th", columns, columns, numeric)));
    table.append(element("tbody", {}, ...rows.map((row) => line("td", row, columns, numeric))));
    const wide = element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": this.#title }, table);
    this.element.replaceChildren(element("div", { class: "card-head" }, element("h2", {}, this.#title)), wide);
    if (leftOut > 0) this.element.append(element("p", { class: "empty" }, `${counted(leftOut, "row")} more`));
    else if (rows.length === 0) this.element.append(element("p", { class: "empty" }, "Nothing yet."));
  }
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
