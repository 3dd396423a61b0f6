// Elements of the page, and numbers, times and names in words.

const SVG = new Set(["line", "rect", "text", "title", "g"]);

export const place = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function say(id, text) {
  const found = place(id);
  if (found.textContent !== text) found.textContent = text;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
  return `${count.toFixed(count < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${seconds.toFixed(1)} s`;
}

const two = (number) => String(number).padStart(2, "0");

// Local date and time: a fault may be older than today.
export function moment(time) {
  const at = new Date(time);
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${date} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export const exactly = (time) => `${moment(time)}.${String(new Date(time).getMilliseconds()).padStart(3, "0")}`;

export function age(time) {
  const seconds = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, each]) => seconds >= each) ?? ["s", 1];
  return `${Math.floor(seconds / length)} ${unit}`;
}

// The begin and the end of a long name; the whole name stays in a tooltip.
export function shortened(name, most = 24) {
  const end = Math.floor(most / 3);
  return name.length > most ? `${name.slice(0, most - end - 1)}…${name.slice(-end)}` : name;
}

export const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });
export const word = (text) => (text === "none" ? "" : text);
