"use strict";
// What every page of corral's is drawn with: elements, numbers, axes, frames, and saving what is shown. Texts from runs only ever
// become text nodes, and nothing is asked of the network.

const data = JSON.parse(document.getElementById("data").textContent);

// ---- small things

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const finite = value => typeof value === "number" && Number.isFinite(value);

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "rect", "title", "desc"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null));
  return node;
}

function readable(value, percent = false) {
  if (value === Infinity) return "∞";
  if (!finite(value)) return "—";
  if (percent) return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value !== 0 ? 2 : 1)} %`.replace("-", "−");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e").replace("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 3 }).replace("-", "−");
}

function interquartileMean(values) { // as SciPy's trim_mean(values, 0.25)
  const sorted = [...values].sort((a, b) => a - b), cut = Math.floor(sorted.length / 4);
  const kept = sorted.slice(cut, sorted.length - cut);
  return kept.reduce((sum, value) => sum + value, 0) / kept.length;
}

// ---- axes

function ticksOf(low, high, count) {
  const raw = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= raw) || power;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

function scaleOf(values, log, zero, pixels) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low = Math.log10(low); high = Math.log10(high);
    if (high - low < 0.3) { low -= 0.2; high += 0.2; }
    const every = Math.max(1, Math.ceil((high - low) / Math.max(pixels / 34, 1))), ticks = [];
    for (let power = Math.ceil(low / every) * every; power <= high; power += every) ticks.push(10 ** power);
    if (ticks.length < 3) for (let power = Math.floor(low); power <= high; power += 1) for (const m of high - low < 0.7 ? [1.5, 2, 3, 5, 7] : [2, 5])
      if (Math.log10(m) + power >= low && Math.log10(m) + power <= high) ticks.push(m * 10 ** power);
    return { at: value => (Math.log10(value) - low) / (high - low), ticks };
  }
  if (zero) low = Math.min(low, 0);
  if (high - low < 1e-12) { high += Math.abs(high) * 0.1 || 1; if (!zero) low -= Math.abs(low) * 0.1; }
  const room = (high - low) * 0.04;
  if (!(zero && low === 0)) low -= room;
  high += room;
  return { at: value => (value - low) / (high - low), ticks: ticksOf(low, high, pixels / 44) };
}

// ---- frames: a figure, its values, and ways to take both along

// A drawing function fills `.body` with an svg, and sets `figure.table`, a function that gives { head, rows }, and `figure.legend`,
// a list of { label, colour, dash } for figures whose svg does not name its colours.
function frame(title, metric) {
  const figure = make("figure", { "data-metric": metric }, make("h3", {}, title), make("figcaption"), make("div", { class: "body" }), make("div", { class: "tip", role: "status", hidden: "" }));
  const out = make("div"), name = (metric || title).replace(/\W+/g, "_");
  const button = (text, act) => { const node = make("button", { type: "button", "aria-label": `${text} of ${title}` }, text); node.addEventListener("click", () => act(node)); return node; };
  const values = button("Values", node => { const open = out.firstChild; out.replaceChildren(...(open ? [] : [valueTable(figure.table())])); node.setAttribute("aria-expanded", String(!open)); });
  values.setAttribute("aria-expanded", "false");
  figure.append(make("div", { class: "buttons" }, values,
    button("CSV", () => { const { head, rows } = figure.table(); save(`${name}.csv`, [head, ...rows]); }),
    button("SVG", () => { const text = drawnSvg(figure, title); if (text) download(`${name}.svg`, new Blob([text], { type: "image/svg+xml" })); }),
    button("PNG", () => { const text = drawnSvg(figure, title); if (text) drawnPng(text, blob => download(`${name}.png`, blob)); })), out);
  figure.table = () => ({ head: [], rows: [] });
  figure.legend = [];
  return figure;
}

// A line in a group's colour and dash, as in a figure.
const swatch = (colour, dash) => make("svg", { viewBox: "0 0 26 11", height: 11, class: `c${colour}`, "aria-hidden": "true" }, make("line", { class: `curve dash${dash}`, x1: 1, x2: 25, y1: 6, y2: 6 }));
const nameList = lines => make("ul", { class: "names" }, ...lines.map(line => make("li", {}, swatch(line.colour, line.dash), line.label)));

function valueTable({ head, rows }) {
  const line = (cells, kind) => make("tr", {}, ...cells.map(cell => make(kind, {}, typeof cell === "number" ? readable(cell) : String(cell ?? "—"))));
  return make("div", { class: "scroll values", tabindex: 0, role: "region", "aria-label": "Values" }, make("table", {}, make("thead", {}, line(head, "th")), make("tbody", {}, ...rows.slice(0, 2000).map(row => line(row, "td")))));
}

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A text that a spreadsheet would compute is quoted with '.
function save(name, rows) {
  const plain = value => value === null || value === undefined ? "" : String(value);
  const cell = value => finite(value) ? String(value) : /[",\n\r]|^\s*[=+@＝＋－＠-]/.test(plain(value)) ? `"${plain(value).replace(/^(?=\s*[=+@＝＋－＠-])/, "'").replaceAll('"', '""')}"` : plain(value);
  download(name, new Blob([rows.map(row => row.map(cell).join(",")).join("\n") + "\n"], { type: "text/csv" }));
}

const looks = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-family", "font-weight"];

// The figure's svg by itself, as on light paper: looks become attributes, and the title and the names of the colours stand above it.
function drawnSvg(figure, title) {
  const source = figure.querySelector(".body > svg");
  if (!source) return null;
  const root = document.documentElement, theme = root.dataset.theme, [, , width, height] = source.getAttribute("viewBox").split(" ").map(Number);
  const copy = make("svg"), legend = figure.legend.map(one => make("g", { class: `c${one.colour}` }, make("line", { class: `curve dash${one.dash || 0}`, x1: 0, x2: 24, y1: -4, y2: -4 }), make("text", { class: "name", x: 30, y: 0 }, one.label)));
  let x = 14, y = 44;
  legend.forEach((node, index) => {
    const room = 46 + 7.2 * figure.legend[index].label.length;
    if (x > 14 && x + room > width) { x = 14; y += 20; }
    node.setAttribute("transform", `translate(${x} ${y})`);
    x += room;
  });
  const top = legend.length ? y + 14 : 34;
  const heading = make("text", { class: "name heading", x: 14, y: 22 }, title), drawing = make("g", { transform: `translate(0 ${top})` }, ...[...source.childNodes].filter(node => !node.classList || !node.classList.contains("cross")).map(node => node.cloneNode(true)));
  const paper = make("rect", { class: "paper", x: 0, y: 0, width, height: height + top });
  copy.append(make("desc", {}, figure.querySelector("figcaption").textContent), paper, heading, ...legend, drawing);
  for (const [key, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height + top}`, width, height: height + top })) copy.setAttribute(key, value);
  const hidden = make("div", { class: "away" }, copy);
  root.dataset.theme = "light";
  document.body.append(hidden); // looks are known only for what is part of the page
  for (const node of all("*", copy)) if (!["g", "desc", "title"].includes(node.tagName)) {
    const style = getComputedStyle(node);
    for (const look of looks) node.setAttribute(look, style.getPropertyValue(look));
  }
  for (const node of all("*", copy)) for (const name of ["class", "tabindex", "role"]) node.removeAttribute(name);
  hidden.remove();
  if (theme === undefined) delete root.dataset.theme; else root.dataset.theme = theme;
  return new XMLSerializer().serializeToString(copy);
}

function drawnPng(text, done) {
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = make("canvas", { width: 3 * image.width, height: 3 * image.height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(done);
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

// Every table can be taken along: its numbers where the page has them, else its texts.
function tableButtons() {
  for (const region of all(".scroll[aria-label]")) {
    const button = make("button", { type: "button", "aria-label": `CSV of ${region.getAttribute("aria-label")}` }, "CSV");
    button.addEventListener("click", () => {
      const raw = (data.tables || {})[region.dataset.table], cells = row => [...row.cells].map(cell => cell.textContent);
      const rows = raw && raw.length ? [Object.keys(raw[0]), ...raw.map(row => Object.values(row))] : all("tr", region).map(cells);
      save(`${(region.dataset.table || region.getAttribute("aria-label")).replace(/\W+/g, "_")}.csv`, rows);
    });
    region.after(make("div", { class: "buttons" }, button));
  }
}
