// The causes: a sentence per fault, with its ends folded in.
//
// The list is updated in place: an open fault stays open, and the keyboard's focus stays where it is.

import { element, place } from "./page.js";

// Fills the list of ends of an open fault; a closed fault has none in the page.
function unfold(item) {
  const details = item.querySelector("details");
  const told = details.open ? item.ends.join("\n") : "";
  if (item.told === told) return;
  item.told = told;
  details.querySelector("ul").replaceChildren(...(details.open ? item.ends : []).map((end) => element("li", {}, end)));
}

function make({ about, ends }) {
  const item = element("li");
  item.about = about;
  item.ends = [];
  item.told = "";
  if (ends.length) {
    const details = element("details", {}, element("summary"), element("ul"));
    details.addEventListener("toggle", () => unfold(item));
    item.append(details);
  }
  return item;
}

function update(item, { text, ends }) {
  const sentence = item.querySelector("summary") ?? item;
  if (sentence.textContent !== text) sentence.textContent = text;
  item.ends = ends;
  if (ends.length) unfold(item);
}

export function showReasons(reasons) {
  const list = place("reasons");
  const before = new Map([...list.children].map((item) => [item.about, item]));
  const items = reasons.map((reason) => {
    const known = before.get(reason.about);
    const item = known && Boolean(known.querySelector("details")) === reason.ends.length > 0 ? known : make(reason);
    update(item, reason);
    return item;
  });
  const same = items.length === list.children.length && items.every((item, at) => list.children[at] === item);
  if (!same) list.replaceChildren(...items);
}
