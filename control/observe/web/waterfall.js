// Tables whose rows are bars of stages on one axis of time, such as the puts and gets of one version.

import { element, setText } from "./dom.js";
import { bytes, clock, span } from "./format.js";

const MOST_GROUPS = 50;
const MOST_BARS = 64;

/** A row by what its columns mean. */
function bar(table, row) {
  const of = (column) => row[table.columns.indexOf(column)];
  const { group, begin, stages } = table.waterfall;
  const others = table.columns.map((name, place) => [name, row[place]]).filter(([name]) => name !== group && name !== begin && !stages.includes(name));
  const words = others.map(([name, value]) => (name.endsWith("bytes") ? bytes(value) : String(value)));
  return { group: of(group), begin: of(begin), who: table.process, words, stages: stages.map((name) => [name, of(name)]) };
}

export class Waterfall {
  #groups = element("select", { "aria-label": "Which" });
  #bars = element("ol", { class: "bars" });
  #legend = element("p", { class: "legend" });
  #said = element("span", { class: "quiet" });
  #chosen = "";
  #newest = "";
  #all = [];
  #known = "";

  constructor(title) {
    const head = element("div", { class: "card-head" }, element("h2", {}, title), this.#said, this.#groups);
    this.element = element("section", { class: "card waterfall", "aria-label": title }, head, this.#legend, this.#bars);
    this.#groups.addEventListener("change", () => {
      this.#chosen = this.#groups.value;
      this.#draw();
    });
  }

  /** Show the rows of tables as bars. */
  update(tables) {
    const bars = tables.flatMap((table) => table.rows.map((row) => bar(table, row)));
    const text = JSON.stringify(bars);
    if (text === this.#known) return;
    this.#known = text;
    this.#all = bars;
    const newest = new Map();
    for (const each of bars) newest.set(each.group, Math.max(newest.get(each.group) ?? 0, each.begin));
    const groups = [...newest].sort((one, other) => other[1] - one[1]).slice(0, MOST_GROUPS).map(([group]) => group);
    this.#groups.replaceChildren(element("option", { value: "" }, "the newest"), ...groups.map((group) => element("option", { value: group }, group)));
    if (!groups.includes(this.#chosen)) this.#chosen = "";
    this.#groups.value = this.#chosen;
    this.#draw(groups[0]);
  }

  #draw(newest = this.#newest) {
    this.#newest = newest;
    const group = this.#chosen === "" ? newest : this.#chosen;
    const bars = this.#all.filter((each) => each.group === group).sort((one, other) => one.begin - other.begin).slice(-MOST_BARS);
    if (bars.length === 0) return;
    const begin = bars[0].begin;
    const length = Math.max(...bars.map((each) => each.begin - begin + total(each)), 1e-9);
    setText(this.#said, `${group} · ${clock(begin)} · ${span(length)} from the first to the last`);
    const shown = bars[0].stages.map(([name]) => name).filter((name) => bars.some((each) => each.stages.some(([stage, seconds]) => stage === name && seconds > 0)));
    const place = (name) => bars[0].stages.findIndex(([stage]) => stage === name);
    this.#legend.replaceChildren(...shown.map((name) => element("span", { class: "stage", "data-stage": place(name) }, name)));
    this.#bars.replaceChildren(...bars.map((each) => row(each, begin, length)));
  }
}

function total(bar) {
  return bar.stages.reduce((sum, [, seconds]) => sum + seconds, 0);
}

function row(bar, begin, length) {
  const track = element("span", { class: "track" });
  let at = bar.begin - begin;
  for (const [place, [name, seconds]] of bar.stages.entries()) {
    if (seconds <= 0) continue;
    const piece = element("span", { class: "stage", "data-stage": place, title: `${name}: ${span(seconds)}` });
    piece.style.left = `${(100 * at) / length}%`;
    piece.style.width = `${(100 * seconds) / length}%`;
    track.append(piece);
    at += seconds;
  }
  const spoken = bar.stages.filter(([, seconds]) => seconds > 0).map(([name, seconds]) => `${name} ${span(seconds)}`);
  const line = element("li", { title: spoken.join(", ") }, element("span", { class: "bar-name" }, [bar.who, ...bar.words].join(" · ")));
  line.append(track, element("span", { class: "bar-time" }, span(total(bar))), element("span", { class: "visually-hidden" }, spoken.join(", ")));
  return line;
}
