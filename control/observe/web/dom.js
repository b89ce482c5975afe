// Elements of the page. Everything that comes from the job enters as text: nothing is ever parsed as HTML.

/** A new element with these attributes, and these elements and texts in it. */
export function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...content);
  return made;
}

/** Change a text where it differs: most of them stay as they are. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Change an attribute where it differs. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** What a reader has chosen on this browser, or null; a browser may keep nothing. */
export function recall(name) {
  try {
    return localStorage.getItem(`skipper-${name}`);
  } catch {
    return null;
  }
}

/** Keep a choice on this browser, if it keeps any; null forgets it. */
export function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(`skipper-${name}`);
    else localStorage.setItem(`skipper-${name}`, value);
  } catch {
    return;
  }
}

/** Ask the server for something, as JSON. An error says why there is no answer, in words for people. */
export async function ask(path, query = {}, patienceMs = 15000) {
  const fields = new URLSearchParams(query).toString();
  const answer = await fetch(fields ? `${path}?${fields}` : path, { signal: AbortSignal.timeout(patienceMs) });
  if (answer.status === 403) throw new Error((await answer.text()).trim());
  if (!answer.ok) throw new Error(`the server says ${answer.status}`);
  return answer.json();
}
