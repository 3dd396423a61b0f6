// The dashboard. Fetches the sidecar's state (/health, /v1/*) on every streamed event, and once per
// second for counters.

import { age, byNumber, bytes, duration, element, exactly, moment, place, say, shortened, word } from "./page.js";
import { drawRails, look, severity, stateOf, why } from "./picture.js";
import { showReasons } from "./reasons.js";
import { drawTimeline, keepWorkers, move } from "./timeline.js";

const REFRESH_MS = 1000;
const AT_MOST_EVERY_MS = 100;
const WINDOW_S = 10; // averaging window of the collectives table
const EVENTS_SHOWN = 200;
const REQUESTS_SHOWN = 20;
const NOTABLE = new Set(["rail_state", "verdict", "speed", "stall", "abort", "injected", "short_of_cpu"]);

const HEALTH = {
  ok: ["good", "All rails up"],
  degraded: ["warn", "Degraded: requests are served"],
  failing: ["bad", "Failing: requests are not served"],
  "no-engine": ["new", "No engine is running here"],
};

// ---- rails ----

// Merges all rail ends at each port: worst state since its begin, sum of the rates, set of peers.
function ports(rails) {
  const found = new Map();
  for (const rail of rails) {
    if (rail.kind === "shm") continue;
    const port = found.get(rail.name) ?? { ...rail, tx: 0, rx: 0, links: 0, up: 0, peers: new Set() };
    const worse = severity(rail) - severity(port);
    if (worse > 0) Object.assign(port, rail);
    else if (worse === 0 && Date.parse(rail.since) < Date.parse(port.since)) port.since = rail.since;
    port.tx += rail.tx_bytes_per_s;
    port.rx += rail.rx_bytes_per_s;
    port.links++;
    port.up += rail.state === "UP";
    port.peers.add(rail.peer);
    found.set(rail.name, port);
  }
  return [...found.values()].sort((a, b) => byNumber(a.name, b.name));
}

// The sidecar reports a mean rate, so a rail not UP shows no rate instead of a stale value.
const rate = (port, count) => (port.state === "UP" ? `${bytes(count)}/s` : "");

function showRails(found) {
  const rows = found.map((port) =>
    element("tr", {},
      element("th", { scope: "row" }, port.name),
      element("td", {}, port.device || port.kind),
      element("td", { class: look(port) }, stateOf(port)),
      element("td", { title: exactly(port.since) }, `${moment(port.since)} (${age(port.since)})`),
      element("td", {}, port.state === "UP" ? "" : why(port)),
      element("td", {}, port.state === "UP" ? "" : word(port.verdict)),
      element("td", { class: "number" }, `${port.up} of ${port.links}`),
      element("td", { class: "number" }, rate(port, port.tx)),
      element("td", { class: "number" }, rate(port, port.rx)),
      element("td", { class: "number" }, `${port.round_trip_us.toFixed(0)} µs`)));
  place("rails").replaceChildren(...rows);
  drawRails(found);
}

// ---- collectives ----

const snapshots = []; // counters of the last WINDOW_S seconds: { at, rows by key, stalls by group }

function quantile(buckets, bounds, share) {
  const total = buckets.reduce((sum, count) => sum + count, 0);
  let passed = 0;
  for (const [index, count] of buckets.entries()) {
    passed += count;
    if (passed >= share * total && count) return bounds[index] ?? Infinity;
  }
  return 0;
}

// Stalls are counted by group: all collectives of a group have the same number.
function stalledGroups(collectives) {
  return new Map(collectives.map((row) => [`${row.worker} ${row.group}`, row.stalled_s]));
}

function showCollectives({ bounds_s: bounds, collectives }) {
  const at = performance.now() / 1000;
  const rows = new Map(collectives.map((row) => [`${row.worker} ${row.group} ${row.collective}`, row]));
  const groups = stalledGroups(collectives);
  snapshots.push({ at, rows, groups });
  while (snapshots.length > 2 && at - snapshots[1].at >= WINDOW_S) snapshots.shift();
  const [before] = snapshots;
  const told = new Set(); // groups with a row: the number stands in the first
  const shown = [...rows].map(([key, row]) => {
    const old = before.rows.get(key);
    const buckets = row.buckets.map((count, index) => count - (old?.buckets[index] ?? 0));
    const group = `${row.worker} ${row.group}`;
    const stalled = told.has(group) ? 0 : groups.get(group) - (before.groups.get(group) ?? 0);
    told.add(group);
    const rate = (row.calls - (old?.calls ?? 0)) / Math.max(at - before.at, 1);
    const of = (share) => {
      const bound = quantile(buckets, bounds, share);
      return bound === 0 ? "" : bound === Infinity ? `> ${duration(bounds.at(-1))}` : `≤ ${duration(bound)}`;
    };
    return element("tr", {},
      element("th", { scope: "row" }, row.label), element("td", {}, row.group), element("td", {}, row.collective),
      element("td", { class: "number" }, rate.toFixed(rate < 10 ? 1 : 0)),
      element("td", { class: "number" }, of(0.5)), element("td", { class: "number" }, of(0.99)),
      element("td", { class: "number" }, stalled > 0 ? duration(stalled) : ""));
  });
  place("collectives").replaceChildren(...shown);
}

// ---- nodes ----

// Fills the table of nodes; hidden without peers.
function showNodes({ members }) {
  place("nodes").hidden = members.length < 2;
  const rows = members.map(({ url, answers, error, node }) => {
    const [looks, words] = answers ? HEALTH[node.health.status] : ["bad", "The sidecar does not answer"];
    const rails = (node?.rails ?? []).filter((rail) => rail.kind !== "shm");
    const running = (node?.workers ?? []).filter((worker) => worker.status === "running");
    return element("tr", {},
      element("th", { scope: "row" }, url ? element("a", { href: url, title: url }, url) : "this sidecar"),
      element("td", { class: looks }, words),
      element("td", {}, answers ? running.map((worker) => worker.label).join(", ") : ""),
      element("td", {}, answers ? `${rails.filter((rail) => rail.state === "UP").length} of ${rails.length}` : ""),
      element("td", { class: "words" }, answers ? node.health.reasons.join("; ") : error));
  });
  place("members").replaceChildren(...rows);
}

// ---- requests ----

function requestLink(id) {
  const href = `v1/requests/${encodeURIComponent(id)}/impact`;
  return element("a", { href, title: id, "aria-label": id }, shortened(id));
}

function showRequests({ requests }) {
  const time = (seconds) => (seconds === null ? "" : duration(seconds));
  const before = (request) => request.queue_stall_s + request.prefill_stall_s;
  const rows = requests.map((request) =>
    element("tr", {},
      element("th", { scope: "row" }, requestLink(request.id)),
      element("td", {}, request.status),
      element("td", { class: "number" }, request.stall_percent === null
        ? duration(request.stall_s)
        : `${duration(request.stall_s)} (${request.stall_percent.toFixed(1)} %)`),
      element("td", { class: "number" }, before(request) ? duration(before(request)) : ""),
      element("td", { class: "number" }, duration(request.late_s)),
      element("td", { class: "number" }, time(request.e2e_s)),
      element("td", { class: "number" }, time(request.e2e_without_s)),
      element("td", { class: "number" }, time(request.worst_itl_s))));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: 8, class: "quiet" }, "No stalled request.")));
  place("requests").replaceChildren(...rows);
}

// ---- events ----

const events = []; // oldest first

function describe(event) {
  const where = event.rail ? `${event.rail} to ${event.peer}` : event.group;
  const what = {
    stall: () => `${event.text} call ${event.call} stalled for ${duration(event.value / 1e9)}`,
    verdict: () => `the fault is ${event.text === "transient" ? "transient" : `at the ${event.text}`}`,
    injected: () =>
      event.text.startsWith("heal")
        ? event.text.replace("heal", "injected fault ended")
        : `fault injected: ${event.text}`,
    speed: () => `${event.text}, ${bytes(event.value)}/s`,
    abort: () => "a collective ended with an error",
  }[event.kind]?.() ?? event.text;
  const told = event.drill && event.kind !== "injected" ? `${what} (drill)` : what;
  return where ? `${event.label}: ${where}: ${told}` : `${event.label}: ${told}`;
}

function take(event) {
  if (event.kind === "rail_state") move(event);
  if (!NOTABLE.has(event.kind)) return;
  events.push(event);
  if (events.length > EVENTS_SHOWN) events.shift();
}

function showEvents() {
  const items = events.toReversed().map((event) =>
    element("li", { "data-kind": event.kind }, element("time", { datetime: event.time }, exactly(event.time)), describe(event)));
  place("events").replaceChildren(...items);
}

// ---- updates ----

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function showHealth({ status, details }) {
  const [looks, words] = HEALTH[status];
  place("health").className = `pill ${looks}`;
  say("health", words);
  showReasons(details);
}

// Which machine to walk to, and what it serves.
function showNode({ host, models }, workers) {
  const count = workers.size === 1 ? "1 worker" : `${workers.size} workers`;
  say("node", [host, ...models.map((name) => shortened(name, 48)), count].join(" · "));
  place("node").title = [host, ...models].join(" · ");
  document.title = `r2serve: ${host}`;
}

let asking = false;
let again = 0;

async function refresh() {
  if (asking) return;
  asking = true;
  try {
    const [health, rails, collectives, requests, cluster, sidecar] = await Promise.all(
      ["health", "v1/rails", "v1/collectives", `v1/requests?waited=true&limit=${REQUESTS_SHOWN}`, "v1/cluster", "v1/sidecar"].map(ask));
    showHealth(health);
    showRails(ports(rails.rails));
    const workers = new Set(rails.rails.map((rail) => rail.worker));
    keepWorkers(workers);
    showNode(sidecar, workers);
    showCollectives(collectives);
    showRequests(requests);
    showNodes(cluster);
    drawTimeline();
    say("connection", "live");
  } catch {
    say("connection", "the sidecar does not answer");
  } finally {
    asking = false;
  }
}

function soon() {
  again ||= setTimeout(() => {
    again = 0;
    showEvents();
    refresh();
  }, AT_MOST_EVERY_MS);
}

let last = 0; // id of the last event taken

async function catchUp() {
  for (let page; !page || page.events.length; ) {
    page = await ask(`v1/events?limit=1000&after=${last}`);
    page.events.forEach(take);
    last = page.next;
  }
  showEvents();
  drawTimeline();
}

async function follow() {
  try {
    await catchUp();
  } catch {
    setTimeout(follow, REFRESH_MS); // refresh() shows that the sidecar does not answer
    return;
  }
  const stream = new EventSource(`v1/events/stream?after=${last}`);
  for (const kind of [...NOTABLE, "replay", "hedge"])
    stream.addEventListener(kind, (message) => {
      const event = JSON.parse(message.data);
      last = event.id;
      take(event);
      soon();
    });
  stream.onerror = () => {
    stream.close();
    setTimeout(follow, REFRESH_MS);
  };
}

refresh();
follow();
setInterval(refresh, REFRESH_MS);
