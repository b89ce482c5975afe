// Asks the server for the job once per interval, and has the page that is open show what it says.

import { Part } from "./actor.js";
import { CallBounds } from "./bounds.js";
import { Cards } from "./cards.js";
import { ask, element, recall, remember, setAttribute, setText } from "./dom.js";
import { Faults } from "./errors.js";
import { clock, counted, duration } from "./format.js";
import { LogsPage } from "./logs.js";
import { Model } from "./model.js";
import { parsed, pathOf } from "./paths.js";
import { Topology } from "./topology.js";
import { TableCard, Tiles, showFigures } from "./view.js";
import { Waterfall } from "./waterfall.js";

const THEMES = ["system", "dark", "light"];
const MOST_NAMED = 5;

const at = (id) => document.getElementById(id);
const model = new Model();
const bounds = new CallBounds({ slow: at("slow-after"), hung: at("hung-after") }, () => newest && draw(newest));
const tiles = new Tiles(at("rates"));
const topology = new Topology(at("topology"), at("filter"), at("no-match"), bounds);
const faults = new Faults(at("events"), at("no-events"), () => newest && draw(newest));
const tables = new Cards(at("tables"), (title) => new TableCard(title));
const waterfalls = new Cards(at("tables"), (title) => new Waterfall(title));
const part = new Part(at("part"), model, bounds);
const logs = new LogsPage(at("logs"));

let newest = null;
let heardAt = performance.now();
let intervalMs = 1000;
let theme = recall("theme") ?? "system";

function show(look) {
  bounds.take(look);
  if (model.take(look)) newest = look;
  if (newest !== null) draw(newest);
  if (look.problem) say("silent", "out of reach", `Cannot look into the job: ${look.problem}`);
  else heardAt = performance.now();
}

/** Show the newest look on the page that is open, and above it whether all is well. */
function draw(look) {
  const { page } = parsed(location.hash);
  if (page === "overview") {
    tiles.update(model.totals);
    topology.update(look);
    faults.update(look);
    tables.update(look.tables.filter((table) => !table.waterfall));
    waterfalls.update(look.tables.filter((table) => table.waterfall));
    showFigures(at("figures-card"), at("figures"), look.processes);
  }
  if (page === "actor" || page === "process") part.update(look);
  showHead(look);
  showHealth(look);
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
  setText(at("job"), `${look.name} · job ${look.job}`.replace(/^ · /, ""));
  setText(at("facts"), facts.join(" · "));
}

function showHealth(look) {
  const silent = look.processes.filter((process) => process.state === "silent").map((process) => process.name);
  const [slow, hung] = [[], []];
  for (const process of look.processes) {
    for (const actor of process.actors ?? []) {
      const judged = bounds.judge(actor);
      if (judged !== null) (judged[0] === 2 ? hung : slow).push({ process, actor, judged });
    }
  }
  const alarm = silent.length > 0 ? `${silent.length} silent` : hung.length > 0 ? counted(hung.length, "call hangs?", "calls hang?") : "";
  document.title = `${alarm ? `▲ ${alarm} · ` : ""}${look.name || look.job} · Skipper`;
  if (look.outcome) say("ended", "ended", `${look.name || "The job"} ${look.outcome}. What is shown is its record.`);
  else if (silent.length > 0) say("silent", alarm, `No answer from ${names(silent)}.`);
  else if (hung.length > 0) say("hung", alarm, ...sentence(hung));
  else if (slow.length > 0) say("slow", counted(slow.length, "call is slow", "calls are slow"), ...sentence(slow));
  else say("up", "healthy");
}

/** Whose calls run too long, each with a link to its page. */
function sentence(calls) {
  const longest = calls.sort((one, other) => other.judged[2] - one.judged[2]).slice(0, MOST_NAMED);
  const words = longest.flatMap(({ process, actor, judged: [, endpoint, seconds] }, place) => [
    place === 0 ? "" : ", ",
    element("a", { href: pathOf(process, actor) }, actor.label),
    ` has been in ${endpoint} for ${duration(seconds)}`,
  ]);
  return [...words, calls.length > longest.length ? ` and ${calls.length - longest.length} more.` : "."];
}

/** Whether all is well, in a word and in a sentence of texts and links. */
function say(state, word, ...words) {
  setAttribute(at("health"), "data-state", state);
  setText(at("health"), word);
  const banner = at("banner");
  setAttribute(banner, "data-state", state);
  banner.hidden = words.length === 0;
  const said = element("p", {}, ...words);
  if (banner.innerHTML !== said.innerHTML) banner.replaceChildren(...said.childNodes); // focus stays where nothing changes
}

function names(list) {
  return list.length > MOST_NAMED ? `${list.slice(0, MOST_NAMED).join(", ")} and ${list.length - MOST_NAMED} more` : list.join(", ");
}

function open() {
  const { page, about } = parsed(location.hash);
  at("overview").hidden = page === "actor" || page === "process" || page === "logs";
  at("part").hidden = page !== "actor" && page !== "process";
  at("logs").hidden = page !== "logs";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) setAttribute(link, "aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  part.open(page === "actor" || page === "process" ? about : null);
  logs.open(page === "logs" ? (about[0] ?? "") : null);
  if (newest !== null) draw(newest);
}

/** How old what is shown is. */
function showAge() {
  const words = newest?.outcome ? `as of ${clock(newest.taken_s)}` : `seen ${duration((performance.now() - heardAt) / 1000)} ago`;
  setText(at("freshness"), words);
}

function showTheme() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(at("theme"), `Theme: ${theme}`);
}

async function look() {
  try {
    const found = await ask("data.json");
    intervalMs = 1000 * (found.interval_s ?? 1);
    show(found);
  } catch (error) {
    say("silent", "no connection", `The dashboard's server does not answer: ${error.message}. The page shows old values.`);
  }
  setTimeout(look, intervalMs);
}

at("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("theme", theme === "system" ? null : theme);
  showTheme();
});
addEventListener("hashchange", open);
setInterval(showAge, 500);
showTheme();
open();
look();
