// What processes have written: the end of it, and what comes.

import { ask, element, setText } from "./dom.js";
import { bytes } from "./format.js";
import { logsPath, meshAndRank, wordOf } from "./paths.js";

const LINES = 2000;
const SHORT_LINES = 200;
const POLL_MS = 1000;
const NEAR_END_PX = 40;
// Sequences for the terminal's colours (ECMA-48): the server leaves no others.
const COLOURS = /\x1b\[[0-9;:]*m/g;

/** Lines that are followed, until it is closed. */
export class LogView {
  #list = element("div", { class: "lines", role: "log", tabindex: "0", "aria-label": "Lines", "aria-live": "off" });
  #note = element("p", { class: "empty", role: "status" }, "Reading …");
  #who;
  #kept;
  #reader = "";
  #last = 0;
  #timer = 0;
  #isOver = false;
  #isHeld = false;
  #wanted = () => true;
  #heard = () => {};

  /**
   * @param place where the lines go
   * @param who as `skipper logs` has it; empty: all
   * @param heard called with each answer of the server
   */
  constructor(place, who, { isShort = false, heard = () => {} } = {}) {
    this.#who = who;
    this.#kept = isShort ? SHORT_LINES : LINES;
    this.#heard = heard;
    this.#list.classList.toggle("short", isShort);
    place.append(this.#list, this.#note);
    this.#poll();
  }

  /** Stop. */
  close() {
    this.#isOver = true;
    clearTimeout(this.#timer);
  }

  /** Show only the lines for which a function of [text, stream, label] is true. */
  choose(wanted) {
    this.#wanted = wanted;
    for (const line of this.#list.children) line.hidden = !wanted(line.dataset.text, line.dataset.stream, line.dataset.label);
    this.#toEnd(true);
  }

  /** Whether new lines are left for later. */
  hold(isHeld) {
    this.#isHeld = isHeld;
    if (!isHeld) {
      clearTimeout(this.#timer);
      this.#poll();
    }
  }

  async #poll() {
    let goesOn = true;
    try {
      const found = await ask("logs.json", { who: this.#who, after: this.#last, reader: this.#reader });
      if (this.#isOver || this.#isHeld) return;
      if (found.problem) setText(this.#note, found.problem);
      else goesOn = this.#take(found);
    } catch (error) {
      if (this.#isOver || this.#isHeld) return;
      setText(this.#note, `Cannot read the output: ${error.message}`);
    }
    clearTimeout(this.#timer);
    if (goesOn && !this.#isOver) this.#timer = setTimeout(() => this.#poll(), POLL_MS);
  }

  #take(found) {
    if (found.reader !== this.#reader) this.#list.replaceChildren();
    this.#reader = found.reader;
    this.#last = found.last;
    const wasAtEnd = this.#isAtEnd();
    this.#list.append(...found.lines.slice(-this.#kept).map((line) => this.#line(line)));
    while (this.#list.children.length > this.#kept) this.#list.firstElementChild.remove();
    this.#toEnd(wasAtEnd);
    const said = [];
    if (this.#list.children.length === 0) said.push("Nothing so far.");
    if (found.skipped_nbytes > 0) said.push(`${bytes(found.skipped_nbytes)} came faster than this page reads, and are left out; skipper logs has them.`);
    if (!found.running) said.push("The job has ended.");
    setText(this.#note, said.join(" "));
    this.#heard(found);
    return found.running;
  }

  #line([, at, label, stream, raw]) {
    const text = raw.replace(COLOURS, "");
    const time = new Date(at * 1000);
    const line = element("p", { class: "line", "data-stream": stream });
    Object.assign(line.dataset, { text, label });
    const clock = `${time.toLocaleTimeString([], { hour12: false })}.${String(time.getMilliseconds()).padStart(3, "0")}`;
    line.append(element("time", { datetime: time.toISOString() }, clock), " ", element("span", { class: "label" }, label), " ", element("span", { class: "said" }, text));
    line.hidden = !this.#wanted(text, stream, label);
    return line;
  }

  #isAtEnd() {
    return this.#list.scrollHeight - this.#list.scrollTop - this.#list.clientHeight < NEAR_END_PX;
  }

  /** The newest line in sight, unless a reader has scrolled away from it. */
  #toEnd(wasAtEnd) {
    if (wasAtEnd) this.#list.scrollTop = this.#list.scrollHeight;
  }
}

/** The page of all output, by mesh and rank. */
export class LogsPage {
  #place;
  #view = null;
  #meshes = element("select", { id: "log-mesh" });
  #ranks = element("select", { id: "log-rank" });
  #stream = element("select", { id: "log-stream" }, element("option", { value: "" }, "both streams"), element("option", { value: "stderr" }, "standard error"), element("option", { value: "stdout" }, "standard output"));
  #words = element("input", { id: "log-words", type: "search", placeholder: "Only lines with", autocomplete: "off", spellcheck: "false" });
  #follow = element("input", { id: "log-follow", type: "checkbox" });
  #body = element("div");
  #known = "";
  #mesh = "";
  #rank = "";

  constructor(place) {
    this.#place = place;
    this.#follow.checked = true;
    const controls = element("div", { class: "controls" });
    for (const [words, control] of [["Mesh", this.#meshes], ["Rank", this.#ranks], ["Stream", this.#stream], ["Text", this.#words]]) {
      controls.append(element("label", {}, element("span", { class: "visually-hidden" }, words), control));
    }
    controls.append(element("label", {}, this.#follow, " follow"));
    place.append(element("div", { class: "card-head" }, element("h2", { id: "logs-title" }, "Output"), controls), this.#body);
    this.#meshes.addEventListener("change", () => this.#go(this.#meshes.value, ""));
    this.#ranks.addEventListener("change", () => this.#go(this.#meshes.value, this.#ranks.value));
    this.#stream.addEventListener("change", () => this.#choose());
    this.#words.addEventListener("input", () => this.#choose());
    this.#follow.addEventListener("change", () => this.#view?.hold(!this.#follow.checked));
  }

  /** Show the output of the processes that a word names, or of all; null: the user leaves the page. */
  open(who) {
    this.#view?.close();
    this.#view = null;
    this.#body.replaceChildren();
    if (who === null) return;
    const named = /^(.*)\[(.*)\]$/s.exec(who);
    [this.#mesh, this.#rank] = named === null ? [who, ""] : [named[1], named[2]];
    this.#known = "";
    this.#list([]);
    this.#follow.checked = true;
    this.#view = new LogView(this.#body, who, { heard: (found) => this.#list(found.processes) });
    this.#choose();
  }

  #go(mesh, rank) {
    location.hash = logsPath(wordOf(mesh, rank)).slice(1);
  }

  #choose() {
    const [stream, words] = [this.#stream.value, this.#words.value.trim().toLowerCase()];
    this.#view?.choose((text, from, label) => (stream === "" || stream === from) && (words === "" || `${label} ${text}`.toLowerCase().includes(words)));
  }

  /** Offer the meshes that have written something, and the ranks of the chosen one. */
  #list(processes) {
    const ranks = new Map([[this.#mesh, new Set([this.#rank])]]);
    for (const process of processes) {
      const [own, rank] = meshAndRank(process.name);
      const [shown] = meshAndRank(process.label);
      const mesh = own === this.#mesh || shown.includes("+") ? own : shown;
      if (!ranks.has(mesh)) ranks.set(mesh, new Set());
      ranks.get(mesh).add(rank);
    }
    const key = JSON.stringify([...ranks].map(([mesh, of]) => [mesh, [...of]]));
    if (key === this.#known) return; // a list that is open stays as it is
    this.#known = key;
    const meshes = [...ranks.keys()].filter((mesh) => mesh !== "").sort();
    this.#meshes.replaceChildren(element("option", { value: "" }, "all meshes"), ...meshes.map((mesh) => element("option", { value: mesh }, mesh)));
    this.#meshes.value = this.#mesh;
    const own = [...(this.#mesh === "" ? [] : ranks.get(this.#mesh))].filter((rank) => rank !== "").sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
    this.#ranks.replaceChildren(element("option", { value: "" }, "all ranks"), ...own.map((rank) => element("option", { value: rank }, rank)));
    this.#ranks.value = this.#rank;
    this.#ranks.disabled = own.length === 0;
  }
}
