// Asks the server for the job once per interval, and shows what it says.

import { counted, duration } from "./format.js";
import { Model } from "./model.js";
import { Topology } from "./topology.js";
import { Events, Tables, Tiles, setAttribute, setText, showFigures } from "./view.js";

const PATIENCE_MS = 15000;

const part = (id) => document.getElementById(id);
const model = new Model();
const tiles = new Tiles(part("rates"));
const topology = new Topology(part("topology"), part("filter"), part("no-match"));
const events = new Events(part("events"), part("no-events"));
const tables = new Tables(part("tables"));

let heardAt = performance.now();
let intervalMs = 1000;

function show(look) {
  if (model.take(look)) {
    tiles.update(look.totals, model.samples);
    topology.update(look);
    events.update(look);
    tables.update(look.tables);
    showFigures(part("figures-card"), part("figures"), look.processes);
    showHead(look);
  }
  const silent = look.processes.filter((process) => process.state === "silent").map((process) => process.name);
  if (look.problem) say("silent", "out of reach", `The job cannot be looked at: ${look.problem}`);
  else if (silent.length > 0) say("silent", `${silent.length} silent`, `No answer from ${names(silent)}.`);
  else say("up", "healthy", "");
  if (!look.problem) heardAt = performance.now();
}

function showHead(look) {
  const script = look.processes[0];
  const hosts = new Set(look.processes.map((process) => process.host).filter(Boolean));
  const facts = [
    counted(hosts.size, "host"),
    counted(look.processes.length, "process", "processes"),
    counted(look.totals.actors, "actor"),
    counted(look.deaths, "death"),
    counted(look.totals.errors, "error"),
  ];
  if (script?.started_s !== undefined) facts.push(`up ${duration(look.taken_s - script.started_s)}`);
  setText(part("job"), `job ${look.job}`);
  setText(part("facts"), facts.join(" · "));
  document.title = `${look.totals.silent ? `▲ ${look.totals.silent} silent · ` : ""}${look.job} · Skipper`;
}

function say(state, word, sentence) {
  setAttribute(part("health"), "data-state", state);
  setText(part("health"), word);
  setText(part("banner"), sentence);
  part("banner").hidden = sentence === "";
}

function names(list) {
  return list.length > 5 ? `${list.slice(0, 5).join(", ")} and ${list.length - 5} more` : list.join(", ");
}

async function look() {
  try {
    const answer = await fetch("data.json", { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const found = await answer.json();
    intervalMs = 1000 * (found.interval_s ?? 1);
    show(found);
  } catch (error) {
    say("silent", "no connection", `The dashboard's server does not answer: ${error.message}. What is shown is old.`);
  }
  setTimeout(look, intervalMs);
}

setInterval(() => setText(part("freshness"), `seen ${duration((performance.now() - heardAt) / 1000)} ago`), 500);
look();
