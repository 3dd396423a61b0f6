// The dashboard. Fetches the sidecar's state (/health, /v1/*) on every streamed event, and once per
// second for counters.

const REFRESH_MS = 1000;
const AT_MOST_EVERY_MS = 100;
const WINDOW_S = 10; // averaging window of the collectives table
const TIMELINE_MS = 5 * 60 * 1000;
const EVENTS_SHOWN = 200;
const REQUESTS_SHOWN = 20;
const NOTABLE = new Set(["rail_state", "verdict", "speed", "stall", "abort", "injected", "short_of_cpu"]);

// Ordered from best to worst. A port shows the worst state of all rail ends at this port.
const STATES = ["UP", "SUSPECT", "PROBATION", "CONNECTING", "FENCING", "DOWN"];
const LOOKS = { UP: "good", SUSPECT: "warn", PROBATION: "new", CONNECTING: "bad", FENCING: "bad", DOWN: "bad" };
const HEALTH = {
  ok: ["good", "All rails up"],
  degraded: ["warn", "Degraded: requests are served"],
  failing: ["bad", "Failing: requests are not served"],
  "no-engine": ["new", "No engine is running here"],
};

const place = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const svg = ["line", "rect", "text", "title", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
  return `${count.toFixed(count < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${seconds.toFixed(1)} s`;
}

const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false };
const clock = (time) => new Date(time).toLocaleTimeString([], { ...CLOCK, fractionalSecondDigits: 3 });

// ---- rails ----

// Merges all rail ends at each port: worst state, sum of the rates, set of peers.
function ports(rails) {
  const found = new Map();
  for (const rail of rails) {
    if (rail.kind === "shm") continue;
    const port = found.get(rail.name) ?? { ...rail, tx: 0, rx: 0, peers: new Set() };
    const worse = STATES.indexOf(rail.state) > STATES.indexOf(port.state);
    if (worse || (rail.presence === "never up" && port.presence !== "never up")) Object.assign(port, rail);
    port.slow ||= rail.slow;
    port.tx += rail.tx_bytes_per_s;
    port.rx += rail.rx_bytes_per_s;
    port.peers.add(rail.peer);
    found.set(rail.name, port);
  }
  return [...found.values()].sort((a, b) => byNumber(a.name, b.name));
}

function stateOf(port) {
  if (port.presence === "never up") return "never up";
  const state = port.state === "UP" && port.slow ? "UP, slow" : port.state;
  return port.reserve ? `${state}, reserve` : state;
}
const look = (port) => (port.state === "UP" && port.slow ? "warn" : LOOKS[port.state] ?? "new");
// Why a rail is not UP: the cause of its loss, or the reason why it has never been up.
const why = (port) => (port.presence === "never up" ? port.never_up.replaceAll("_", " ") : word(port.cause));
// The sidecar reports a mean rate, so a rail not UP shows no rate instead of a stale value.
const rate = (port, count) => (port.state === "UP" ? `${bytes(count)}/s` : "");
const word = (text) => (text === "none" ? "" : text);

function showRails(found) {
  const rows = found.map((port) =>
    element("tr", {},
      element("th", { scope: "row" }, port.name),
      element("td", {}, port.device || port.kind),
      element("td", { class: look(port) }, stateOf(port)),
      element("td", {}, clock(port.since)),
      element("td", {}, port.state === "UP" ? "" : why(port)),
      element("td", {}, port.state === "UP" ? "" : word(port.verdict)),
      element("td", { class: "number" }, rate(port, port.tx)),
      element("td", { class: "number" }, rate(port, port.rx)),
      element("td", { class: "number" }, `${port.round_trip_us.toFixed(0)} µs`)));
  place("rails").replaceChildren(...rows);
  drawRails(found);
}

function faultAt(verdict) {
  return verdict === "transient" ? "transient fault" : `fault at the ${verdict}`;
}

// Draws a box per node, a box for the peers, and a line per port in between.
function drawRails(found) {
  const [width, step, box] = [760, 44, 130];
  const nodes = Map.groupBy(found, (port) => port.name.split("@")[1] ?? "this node");
  if (!nodes.size) nodes.set("no rails", []);
  const drawn = [];
  let top = 0;
  for (const [node, ports] of nodes) {
    const height = Math.max(1, ports.length) * step + 16;
    const peers = new Set(ports.flatMap((port) => [...port.peers]));
    const others = peers.size > 2 ? `${peers.size} peers` : [...peers].join(", ") || "no peer";
    for (const [x, words] of [[1, node], [width - box - 1, others]])
      drawn.push(
        element("rect", { class: "node", x, y: top + 4, width: box, height: height - 8, rx: 8 }),
        element("text", { x: x + 12, y: top + height / 2 + 4 }, words));
    ports.forEach((port, row) => {
      const y = top + 8 + step * (row + 0.65);
      const words = [port.name, port.device, stateOf(port)];
      if (port.state === "UP") words.push(`${bytes(port.tx + port.rx)}/s`);
      else words.push(word(port.cause), word(port.verdict) && faultAt(port.verdict));
      drawn.push(
        element("line", { class: `rail ${look(port)}`, x1: box + 6, x2: width - box - 6, y1: y, y2: y }),
        element("text", { class: look(port), x: width / 2, y: y - 8, "text-anchor": "middle" }, words.filter(Boolean).join(" · ")));
    });
    top += height;
  }
  const svg = place("picture");
  svg.setAttribute("viewBox", `0 0 ${width} ${top}`);
  svg.replaceChildren(...drawn);
}

// ---- collectives ----

const snapshots = []; // counters of the last WINDOW_S seconds: { at, rows by key }

function quantile(buckets, bounds, share) {
  const total = buckets.reduce((sum, count) => sum + count, 0);
  let passed = 0;
  for (const [index, count] of buckets.entries()) {
    passed += count;
    if (passed >= share * total && count) return bounds[index] ?? Infinity;
  }
  return 0;
}

function showCollectives({ bounds_s: bounds, collectives }) {
  const at = performance.now() / 1000;
  const rows = new Map(collectives.map((row) => [`${row.worker} ${row.group} ${row.collective}`, row]));
  snapshots.push({ at, rows });
  while (snapshots.length > 2 && at - snapshots[1].at >= WINDOW_S) snapshots.shift();
  const [before] = snapshots;
  const shown = [...rows].map(([key, row]) => {
    const old = before.rows.get(key);
    const buckets = row.buckets.map((count, index) => count - (old?.buckets[index] ?? 0));
    const rate = (row.calls - (old?.calls ?? 0)) / Math.max(at - before.at, 1);
    const of = (share) => {
      const bound = quantile(buckets, bounds, share);
      return bound === 0 ? "" : bound === Infinity ? `> ${duration(bounds.at(-1))}` : `≤ ${duration(bound)}`;
    };
    return element("tr", {},
      element("th", { scope: "row" }, row.label), element("td", {}, row.group), element("td", {}, row.collective),
      element("td", { class: "number" }, rate.toFixed(rate < 10 ? 1 : 0)),
      element("td", { class: "number" }, of(0.5)), element("td", { class: "number" }, of(0.99)),
      element("td", { class: "number" }, row.stalled_s ? duration(row.stalled_s) : ""));
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
      element("th", { scope: "row" }, url ? element("a", { href: url }, url) : "this sidecar"),
      element("td", { class: looks }, words),
      element("td", {}, answers ? running.map((worker) => worker.label).join(", ") : ""),
      element("td", {}, answers ? `${rails.filter((rail) => rail.state === "UP").length} of ${rails.length}` : ""),
      element("td", {}, answers ? node.health.reasons.join("; ") : error));
  });
  place("members").replaceChildren(...rows);
}

// ---- requests ----

function showRequests({ requests }) {
  const time = (seconds) => (seconds === null ? "" : duration(seconds));
  const before = (request) => request.queue_stall_s + request.prefill_stall_s;
  const rows = requests.map((request) =>
    element("tr", {},
      element("th", { scope: "row" }, element("a", { href: `v1/requests/${encodeURIComponent(request.id)}/impact` }, request.id)),
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
const lanes = new Map(); // state changes per rail end: { name, worker, moves }

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
  if (event.kind === "rail_state") {
    const key = `${event.worker} ${event.rail} ${event.peer}`;
    const [, to] = event.text.split(" ")[0].split("->");
    const lane = lanes.get(key) ?? lanes.set(key, { name: event.rail, worker: event.worker, moves: [] }).get(key);
    lane.moves.push({ at: Date.parse(event.time), state: to });
    if (lane.moves.length > 500) lane.moves.shift();
  }
  if (!NOTABLE.has(event.kind)) return;
  events.push(event);
  if (events.length > EVENTS_SHOWN) events.shift();
}

function showEvents() {
  const items = events.toReversed().map((event) =>
    element("li", { "data-kind": event.kind }, element("time", { datetime: event.time }, clock(event.time)), describe(event)));
  place("events").replaceChildren(...items);
}

// Returns the worst state among the lanes after each state change.
function worstOf(found) {
  const all = found.flatMap((lane) => lane.moves.map((move) => ({ ...move, lane }))).sort((a, b) => a.at - b.at);
  const now = new Map();
  return all.map(({ at, state, lane }) => {
    now.set(lane, state);
    const worst = Math.max(...[...now.values()].map((each) => STATES.indexOf(each)));
    return { at, state: STATES[worst] };
  });
}

function drawTimeline() {
  const [width, row, left] = [760, 18, 130];
  const now = Date.now();
  const x = (at) => left + (width - left) * Math.max(0, 1 - (now - at) / TIMELINE_MS);
  const names = [...new Set([...lanes.values()].map((lane) => lane.name))].sort(byNumber);
  const svg = place("timeline");
  svg.setAttribute("viewBox", `0 0 ${width} ${names.length * row + 20}`);
  const drawn = [];
  names.forEach((name, index) => {
    const y = index * row;
    drawn.push(element("text", { x: 0, y: y + 13 }, name));
    const moves = worstOf([...lanes.values()].filter((lane) => lane.name === name));
    moves.forEach((move, at) => {
      const end = moves[at + 1]?.at ?? now;
      if (now - end > TIMELINE_MS) return;
      drawn.push(element("rect", {
        class: LOOKS[move.state] ?? "new", x: x(move.at), y: y + 3, width: Math.max(1.5, x(end) - x(move.at)), height: row - 6,
      }, element("title", {}, `${name} ${move.state} at ${clock(move.at)}`)));
    });
  });
  const bottom = names.length * row + 14;
  drawn.push(
    element("text", { class: "quiet", x: left, y: bottom }, "5 minutes ago"),
    element("text", { class: "quiet", x: width, y: bottom, "text-anchor": "end" }, "now"));
  svg.replaceChildren(...drawn);
}

// Drops the lanes of ended workers, so the timeline shows only running workers.
function forgetLanes(rails) {
  const running = new Set(rails.map((rail) => rail.worker));
  for (const [key, lane] of lanes) if (!running.has(lane.worker)) lanes.delete(key);
}

// ---- updates ----

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function showHealth({ status, reasons, notes }) {
  const [looks, words] = HEALTH[status];
  const pill = place("health");
  pill.className = `pill ${looks}`;
  if (pill.textContent !== words) pill.textContent = words;
  const said = [...reasons, ...notes];
  place("reasons").replaceChildren(...said.map((text) => element("li", {}, text)));
}

let asking = false;
let again = 0;

async function refresh() {
  if (asking) return;
  asking = true;
  try {
    const [health, rails, collectives, requests, cluster] = await Promise.all(
      ["health", "v1/rails", "v1/collectives", `v1/requests?waited=true&limit=${REQUESTS_SHOWN}`, "v1/cluster"].map(ask));
    showHealth(health);
    showRails(ports(rails.rails));
    forgetLanes(rails.rails);
    showCollectives(collectives);
    showRequests(requests);
    showNodes(cluster);
    drawTimeline();
    place("connection").textContent = "live";
  } catch {
    place("connection").textContent = "the sidecar does not answer";
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
