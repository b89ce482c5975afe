// Pages and their addresses, which are fragments of one address: what was seen stays when a reader goes from page to page.

/** The address of a process' page, or that of an actor in it. */
export function pathOf(process, actor) {
  const place = encodeURIComponent(process.id);
  return actor === undefined ? `#/process/${place}` : `#/actor/${place}/${encodeURIComponent(actor.id)}`;
}

/** The address of the page with the output of the processes that a word names; empty: all. */
export function logsPath(who) {
  return who === "" ? "#/logs" : `#/logs/${encodeURIComponent(who)}`;
}

/** What a fragment names: the page, and what it is about. */
export function parsed(fragment) {
  const [page, ...about] = fragment.replace(/^#\/?/, "").split("/");
  try {
    return { page: page || "overview", about: about.map(decodeURIComponent) };
  } catch {
    return { page: "overview", about: [] };
  }
}

/** The name of a mesh and a rank of it: "workers" and "gpus=1" of "workers{'gpus': 1}" and of "workers gpus=1". */
export function meshAndRank(name) {
  const brace = name.indexOf("{");
  if (brace >= 0) {
    const axes = [...name.slice(brace).matchAll(/'(\w+)': (\d+)/g)];
    return [name.slice(0, brace), axes.map(([, axis, index]) => `${axis}=${index}`).join(",")];
  }
  const rank = /(?: \w+=\d+)+$/.exec(name)?.[0] ?? "";
  return [name.slice(0, name.length - rank.length), rank.trim().replaceAll(" ", ",")];
}

/** How a process, or a mesh, is named to `skipper logs`. */
export function wordOf(mesh, rank) {
  return rank === "" ? mesh : `${mesh}[${rank}]`;
}
