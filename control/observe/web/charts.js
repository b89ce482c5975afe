// A figure and how it was lately: small at first, and wide, with its axes, for who presses it.

import { element, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 600;
const HEIGHT = 30;
const SMALL_SAMPLES = 120;
const SPANS = [
  ["2 min", 120],
  ["10 min", 600],
  ["1 h", 3600],
];

export class Chart {
  #parts = {};
  #show;
  #unit;
  #span = SPANS[0][1];
  #times = [];
  #samples = [];
  #drawn = { times: [], values: [] };

  /**
   * @param name by which code finds it
   * @param title for people
   * @param show makes a text of a value
   * @param unit follows it
   */
  constructor(name, title, show, unit) {
    this.#show = show;
    this.#unit = unit;
    const value = element("span", { class: "tile-value" }, "–", element("small", {}, unit));
    const button = element("button", { class: "tile-face", type: "button", "aria-expanded": "false", title: "Wide, with axes" });
    button.append(element("span", { class: "tile-name" }, title), value);
    const svg = document.createElementNS(SVG, "svg");
    const [area, line] = ["polygon", "polyline"].map((shape) => document.createElementNS(SVG, shape));
    for (const [attribute, content] of Object.entries({ class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(attribute, content);
    svg.append(area, line);
    const top = element("span", { class: "axis-top" });
    const begin = element("span");
    const reading = element("span", { class: "reading" });
    const spans = element("span", { class: "spans", role: "group", "aria-label": "Span of time" });
    for (const [words, seconds] of SPANS) {
      const choice = element("button", { type: "button", "aria-pressed": seconds === this.#span }, words);
      choice.addEventListener("click", () => this.#choose(seconds, spans, choice));
      spans.append(choice);
    }
    const foot = element("div", { class: "axis" }, begin, reading, spans);
    const plot = element("div", { class: "plot" }, top, svg);
    this.element = element("li", { class: "tile", "data-name": name }, button, plot, foot);
    this.#parts = { value, svg, area, line, top, begin, reading };
    button.addEventListener("click", () => {
      const isWide = this.element.classList.toggle("wide-tile");
      setAttribute(button, "aria-expanded", isWide);
      this.#draw();
    });
    svg.addEventListener("pointermove", (event) => this.#read(event));
    svg.addEventListener("pointerleave", () => setText(reading, ""));
  }

  /** Show what there is: samples and when they were taken, the newest last. */
  update(times, samples) {
    this.#times = times;
    this.#samples = samples;
    setText(this.#parts.value.firstChild, samples.length === 0 ? "–" : this.#show(samples.at(-1)));
    this.#draw();
  }

  #choose(seconds, spans, chosen) {
    this.#span = seconds;
    for (const choice of spans.children) setAttribute(choice, "aria-pressed", choice === chosen);
    this.#draw();
  }

  #draw() {
    const isWide = this.element.classList.contains("wide-tile");
    const { times, values } = isWide ? this.#window() : { times: this.#times.slice(-SMALL_SAMPLES), values: this.#samples.slice(-SMALL_SAMPLES) };
    this.#drawn = { times, values };
    const { svg, area, line, top, begin } = this.#parts;
    if (values.length === 0) return;
    const end = times.at(-1);
    // A small chart has a place for each sample, a wide one is true to time.
    const places = isWide ? times.map((at) => this.#span - (end - at)) : values.map((_, place) => SMALL_SAMPLES - values.length + place);
    const width = isWide ? this.#span : SMALL_SAMPLES - 1;
    const most = Math.max(...values, 1e-9);
    const points = values.map((value, place) => `${places[place].toFixed(2)},${(HEIGHT - 1.5 - (25 * value) / most).toFixed(2)}`).join(" ");
    setAttribute(svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setAttribute(line, "points", points);
    setAttribute(area, "points", `${points} ${width},${HEIGHT} ${places[0].toFixed(2)},${HEIGHT}`);
    setText(top, `${this.#show(most)}${this.#unit}`);
    setText(begin, `${clock(end - this.#span)} – ${clock(end)}`);
  }

  /** The samples of the chosen span, the greatest of those that share a point of the drawing. */
  #window() {
    const begin = this.#times.at(-1) - this.#span;
    const first = this.#times.findIndex((at) => at >= begin);
    const step = Math.max(1, Math.ceil((this.#times.length - first) / POINTS));
    const [times, values] = [[], []];
    for (let place = Math.max(first, 0); place < this.#times.length; place += step) {
      const stop = Math.min(place + step, this.#times.length);
      times.push(this.#times[stop - 1]);
      values.push(Math.max(...this.#samples.slice(place, stop)));
    }
    return { times, values };
  }

  #read(event) {
    const { times, values } = this.#drawn;
    if (values.length === 0 || !this.element.classList.contains("wide-tile")) return;
    const box = this.#parts.svg.getBoundingClientRect();
    const at = times.at(-1) - this.#span * (1 - (event.clientX - box.left) / box.width);
    let nearest = 0;
    for (const [place, taken] of times.entries()) if (Math.abs(taken - at) < Math.abs(times[nearest] - at)) nearest = place;
    setText(this.#parts.reading, `${clock(times[nearest])}: ${this.#show(values[nearest])}${this.#unit}`);
  }
}
