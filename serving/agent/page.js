"use strict";
// The page renews itself in place, so that its reader keeps the place, what is unfolded and what is marked.
const PERIOD_MS = 2000, PATIENCE_MS = 10000;

async function renew() {
  try {
    const answer = await fetch(location.pathname + location.search, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(answer.statusText);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    const unfolded = Array.from(document.querySelectorAll("details[open]"), (each) => each.id);
    update(document.querySelector("main"), next.querySelector("main"));
    for (const id of unfolded) document.getElementById(id)?.setAttribute("open", "");
    document.title = next.title;
    document.body.className = "";
  } catch {
    document.title = "no answer - serve-model agent";
    document.body.className = "lost";
  }
  setTimeout(renew, PERIOD_MS);
}

function update(old, next) {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== next.nodeName || old.id !== next.id) {
    old.replaceWith(next);
    return;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...next.childNodes];
  after.forEach((node, at) => (at < before.length ? update(before[at], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
}

setTimeout(renew, PERIOD_MS);
