// The timeline: the worst state of each rail's ends over the last five minutes.
//
// Time and elements are bounded by the number of events and of columns, not by their product.

import { byNumber, element, exactly, place } from "./page.js";

const TIMELINE_MS = 5 * 60 * 1000;
const MOST_MOVES = 20_000; // per rail
const ROW = 18;

const STATES = ["UP", "SUSPECT", "PROBATION", "CONNECTING", "FENCING", "DOWN"]; // from best to worst
const LOOKS = ["good", "warn", "new", "bad", "bad", "bad"];

// Per rail: the changes of state in order of time, and the last one of each end before them.
const tracks = new Map();

export function move(event) {
  const track = tracks.get(event.rail) ?? tracks.set(event.rail, { before: new Map(), moves: [] }).get(event.rail);
  const [, to] = event.text.split(" ")[0].split("->");
  const state = STATES.indexOf(to);
  strange ||= !running.has(event.worker);
  track.moves.push({ at: Date.parse(event.time), state, worker: event.worker, end: `${event.worker} ${event.peer}` });
  if (track.moves.length > MOST_MOVES) settle(track, track.moves[MOST_MOVES / 2].at);
}

// Moves what is older than a time to the states before it.
function settle(track, until) {
  const first = track.moves.findIndex((each) => each.at >= until);
  for (const each of track.moves.splice(0, first < 0 ? track.moves.length : first)) track.before.set(each.end, each);
}

// Drops the ends of workers that have ended: the timeline shows running workers only.
let running = new Set();
let strange = false; // a change of another worker has come
export function keepWorkers(workers) {
  if (!strange && workers.size === running.size && [...workers].every((each) => running.has(each))) return;
  running = workers;
  strange = false;
  for (const [rail, track] of tracks) {
    track.moves = track.moves.filter((each) => workers.has(each.worker));
    for (const [end, each] of track.before) if (!workers.has(each.worker)) track.before.delete(end);
    if (!track.moves.length && !track.before.size) tracks.delete(rail);
  }
}

// Returns the worst state per column; -1 before the first event.
function columnsOf(track, from, columns) {
  const counts = new Array(STATES.length).fill(0);
  const now = new Map();
  const worst = () => counts.findLastIndex((count) => count > 0);
  const apply = ({ end, state }) => {
    if (now.has(end)) counts[now.get(end)]--;
    now.set(end, state);
    counts[state]++;
  };
  track.before.forEach(apply);
  const found = new Array(columns).fill(-1);
  let column = 0;
  for (const each of track.moves) {
    const reached = Math.min(columns - 1, Math.floor(((each.at - from) / TIMELINE_MS) * columns));
    const state = worst();
    for (; column < reached; column++) found[column] = Math.max(found[column], state);
    apply(each);
    found[column] = Math.max(found[column], worst());
  }
  const state = worst();
  for (; column < columns; column++) found[column] = Math.max(found[column], state);
  return found;
}

function drawRow(name, track, { from, left, columns, y }) {
  const drawn = [];
  const found = columnsOf(track, from, columns);
  for (let begin = 0, at = 1; at <= columns; at++) {
    if (found[at] === found[begin]) continue;
    const state = found[begin];
    if (state >= 0)
      drawn.push(element("rect", { class: LOOKS[state], x: left + begin, y: y + 3, width: Math.max(1.5, at - begin), height: ROW - 6 },
        element("title", {}, `${name} ${STATES[state]} at ${exactly(from + (begin / columns) * TIMELINE_MS)}`)));
    begin = at;
  }
  return drawn;
}

export function drawTimeline() {
  const svg = place("timeline");
  const width = Math.max(240, svg.clientWidth || 760);
  const left = 110;
  const from = Date.now() - TIMELINE_MS;
  const names = [...tracks.keys()].sort(byNumber);
  const drawn = names.flatMap((name, index) => {
    const y = index * ROW;
    settle(tracks.get(name), from);
    return [
      element("text", { x: 0, y: y + 13 }, name),
      ...drawRow(name, tracks.get(name), { from, left, columns: Math.floor(width - left), y }),
    ];
  });
  const bottom = names.length * ROW + 14;
  drawn.push(
    element("text", { class: "quiet", x: left, y: bottom }, "5 minutes ago"),
    element("text", { class: "quiet", x: width, y: bottom, "text-anchor": "end" }, "now"));
  svg.setAttribute("viewBox", `0 0 ${width} ${names.length * ROW + 20}`);
  svg.replaceChildren(...drawn);
}
