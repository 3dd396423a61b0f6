// The picture: a box per node, a box for the peers, and a line per port in between.
//
// A unit of the view is a pixel, so texts keep their size on narrow screens.

import { bytes, element, place, shortened, word } from "./page.js";

const CHARACTER = 7; // width of a character of 13 px, generously
const NARROW = 560;
const MOST_LINES = 16; // of a node; of more ports, only those that are not well

// Ordered from best to worst, as in the commands. A port shows the worst of its rail's ends.
const LOOKS = ["good", "warn", "warn", "bad", "bad"];

export function severity(rail) {
  if (rail.presence === "lost") return 4;
  if (rail.presence === "never up") return 3;
  if (rail.state !== "UP") return 2;
  return rail.slow ? 1 : 0;
}

export const look = (port) => LOOKS[severity(port)];

export function stateOf(port) {
  const lost = port.state === "DOWN" ? "DOWN" : "DOWN (reconnecting)";
  const state = ["UP", "UP, slow", port.state, "never up", lost][severity(port)];
  return port.reserve ? `${state}, reserve` : state;
}

// Why a rail is not UP: the cause of its loss, or the reason why it has never been up.
export const why = (port) => (port.presence === "never up" ? port.never_up.replaceAll("_", " ") : word(port.cause));

function faultAt(verdict) {
  return verdict === "transient" ? "transient fault" : `fault at the ${verdict}`;
}

function wordsOf(port) {
  const words = [port.name, stateOf(port), port.device];
  if (port.state === "UP") words.push(`${bytes(port.tx + port.rx)}/s`);
  else words.push(why(port), word(port.verdict) && faultAt(port.verdict));
  return words.filter(Boolean);
}

// Name and state always fit; device, cause and place follow as far as there is room.
function fitting(words, room) {
  const kept = [...words];
  while (kept.length > 2 && kept.join(" · ").length * CHARACTER > room) kept.pop();
  return kept.join(" · ");
}

function drawPort(port, { left, right, y }) {
  const words = wordsOf(port);
  return element("g", {},
    element("title", {}, words.join(" · ")),
    element("line", { class: `rail ${look(port)}`, x1: left, x2: right, y1: y, y2: y }),
    element("text", { class: look(port), x: (left + right) / 2, y: y - 8, "text-anchor": "middle" }, fitting(words, right - left)));
}

function others(ports) {
  const peers = new Set(ports.flatMap((port) => [...port.peers]));
  return peers.size > 2 ? `${peers.size} peers` : [...peers].join(", ") || "no peer";
}

function drawEnds(node, peers, { width, box, top, height }) {
  if (!box)
    return [
      element("text", { class: "quiet", x: 0, y: top + 14 }, shortened(node)),
      element("text", { class: "quiet", x: width, y: top + 14, "text-anchor": "end" }, peers),
    ];
  return [[1, node], [width - box - 1, peers]].flatMap(([x, words]) => [
    element("rect", { class: "node", x, y: top + 4, width: box, height: height - 8, rx: 8 }),
    element("text", { x: x + 12, y: top + height / 2 + 4 }, element("title", {}, words), shortened(words, 15)),
  ]);
}

function ill(ports) {
  if (ports.length <= MOST_LINES) return ports;
  return ports.toSorted((a, b) => severity(b) - severity(a)).filter((port) => severity(port)).slice(0, MOST_LINES);
}

export function drawRails(found) {
  const svg = place("picture");
  const width = Math.max(240, svg.clientWidth || 760);
  const narrow = width < NARROW;
  const [step, box, head] = narrow ? [32, 0, 20] : [40, 130, 0];
  const nodes = Map.groupBy(found, (port) => port.name.split("@")[1] ?? "this node");
  if (!nodes.size) nodes.set("no rails", []);
  const drawn = [];
  let top = 0;
  for (const [node, all] of nodes) {
    const ports = ill(all);
    const further = all.length - ports.length;
    const rows = Math.max(1, ports.length + (further ? 1 : 0));
    const height = head + rows * step + 12;
    drawn.push(...drawEnds(node, others(all), { width, box, top, height }));
    const [left, right] = [box + 6, width - box - 6];
    const yOf = (row) => top + head + 8 + step * (row + 0.65);
    ports.forEach((port, row) => drawn.push(drawPort(port, { left, right, y: yOf(row) })));
    if (further) {
      const words = `${further} more ports${all.length - further < MOST_LINES ? " are UP" : ""}`;
      drawn.push(element("text", { class: "quiet", x: width / 2, y: yOf(ports.length), "text-anchor": "middle" }, words));
    }
    top += height;
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${top}`);
  svg.replaceChildren(...drawn);
}
