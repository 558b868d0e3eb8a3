"use strict";
// What every page of corral's is drawn with: elements, numbers, axes, frames, and saving what is shown. Texts from runs only ever
// become text nodes, and nothing is asked of the network.

document.documentElement.dataset.script = "yes"; // shows what needs one
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
  if (percent) return `${(100 * value).toFixed(Math.abs(value) < 0.001 && value !== 0 ? 2 : 1)} %`.replace("-", "−");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e").replace("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 3 }).replace("-", "−");
}

const several = (count, thing) => `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;

function interquartileMean(values) { // as SciPy's trim_mean(values, 0.25)
  const sorted = [...values].sort((a, b) => a - b), cut = Math.floor(sorted.length / 4);
  const kept = sorted.slice(cut, sorted.length - cut);
  return kept.reduce((sum, value) => sum + value, 0) / kept.length;
}

// A label that fits: its middle is left out, for labels mostly begin and end in what tells them apart.
const fit = (label, most) => label.length <= most ? label : `${label.slice(0, Math.ceil((most - 1) / 2))}…${label.slice(label.length - Math.floor((most - 1) / 2))}`;

// ---- markers: with the colour, one per objective

const shapes = data.shapes;
const marker = (shape, x, y, size = 1, kind = "dot", ...inside) => make("path", { class: kind, d: shapes[shape % shapes.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})${size === 1 ? "" : ` scale(${size})`}` }, ...inside);

// ---- axes

function ticksOf(low, high, count, whole = false) {
  const raw = whole ? Math.max((high - low) / Math.max(count, 1), 1) : (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = (whole && power < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map(factor => factor * power).find(size => size >= raw) || power;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

// Ticks in one unit and with the decimals that tell them apart: 7.5M, 10M, 12.5M.
function axisNumbers(ticks) {
  const most = Math.max(0, ...ticks.map(Math.abs)), [, size, unit] = [[1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]].find(([from]) => most >= from) || [0, 1, ""];
  const digits = [0, 1, 2, 3, 4, 5, 6].find(count => ticks.every(tick => Math.abs(tick / size - Number((tick / size).toFixed(count))) < 1e-6 * most / size));
  if (digits === undefined || most < 1e-3) return readable;
  return tick => tick === 0 ? "0" : `${(tick / size).toLocaleString("en", { maximumFractionDigits: digits })}${unit}`.replace("-", "−");
}

function scaleOf(values, log, zero, pixels, whole = false) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low = Math.log10(low); high = Math.log10(high);
    if (high - low < 0.3) { low -= 0.2; high += 0.2; }
    const every = Math.max(1, Math.ceil((high - low) / Math.max(pixels / 34, 1))), ticks = [];
    for (let power = Math.ceil(low / every) * every; power <= high; power += every) ticks.push(10 ** power);
    if (ticks.length < 3) for (let power = Math.floor(low); power <= high; power += 1) for (const m of high - low < 0.7 ? [1.5, 2, 3, 5, 7] : [2, 5])
      if (Math.log10(m) + power >= low && Math.log10(m) + power <= high) ticks.push(m * 10 ** power);
    return { at: value => (Math.log10(value) - low) / (high - low), ticks, show: readable };
  }
  if (zero) low = Math.min(low, 0);
  if (high - low < 1e-12) { high += Math.abs(high) * 0.1 || 1; if (!zero) low -= Math.abs(low) * 0.1; }
  const room = (high - low) * 0.04;
  if (!(zero && low === 0)) low -= room;
  high += room;
  const ticks = ticksOf(low, high, pixels / 44, whole);
  return { at: value => (value - low) / (high - low), ticks, show: axisNumbers(ticks) };
}

// An axis that grows like a square root: small shares keep apart, and 0 has a place.
function rootScale(high, pixels, apart) {
  const at = value => Math.sqrt(Math.min(Math.max(value, 0) / high, 1)), top = Math.floor(Math.log10(high)), ticks = [0];
  for (let power = top - 3; power <= top; power += 1) for (const step of [1, 2, 5]) {
    const tick = step * 10 ** power;
    if (tick <= high * 1.001 && (at(tick) - at(ticks.at(-1))) * pixels >= apart) ticks.push(tick);
  }
  return { at, ticks };
}

const percents = value => `${+(100 * value).toPrecision(4)} %`;

// A drawing with the grid and the numbers of both axes. `x` and `y` make an axis for so many pixels: { at, ticks, show }.
function plane(body, { about, title, height, x, y, left = 52, right = 14, top = 12, bottom = 38 }) {
  const width = Math.max(body.clientWidth, 240), inner = { width: width - left - right, height: height - top - bottom };
  const across = x(inner.width), up = y(inner.height);
  const px = value => left + across.at(value) * inner.width, py = value => value === Infinity ? top + 3 : top + (1 - up.at(value)) * inner.height;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${about}. Arrow keys read the values.` });
  for (const tick of up.ticks) svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), make("text", { x: left - 7, y: py(tick) + 4, "text-anchor": "end" }, (up.show || readable)(tick)));
  for (const tick of across.ticks) {
    const text = (across.show || readable)(tick), half = 3.7 * text.length; // a number at an edge moves inwards
    svg.append(make("text", { x: Math.min(Math.max(px(tick), half), width - half), y: height - bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, title));
  return { svg, px, py, up, left, right, top, bottom, width, height, inner };
}

const pathOf = (points, x, y) => points.map((point, index) => `${index ? "L" : "M"}${x(point).toFixed(1)} ${y(point).toFixed(1)}`).join("");

// One axis, and a row each for whatever has a name, a marker, and perhaps an interval, seeds and numbers beside it.
function drawRows(figure, rows, { about, title, ends, zero = false, show = readable }) {
  const body = figure.querySelector(".body"), width = Math.max(body.clientWidth, 240), narrow = width < 520, each = narrow ? 46 : 30, bottom = title ? 46 : 30, height = rows.length * each + bottom;
  const left = narrow ? 10 : Math.min(320, 24 + 7.2 * Math.max(...rows.map(row => row.name.length))), right = rows[0].numbers && !narrow ? 180 : 20;
  const scale = scaleOf(ends, false, zero, (width - left - right) * 0.5), px = value => left + scale.at(value) * (width - left - right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": about });
  for (const tick of scale.ticks) svg.append(make("line", { class: tick === 0 ? "zero" : "grid", x1: px(tick), x2: px(tick), y1: 4, y2: height - bottom + 8 }), make("text", { x: px(tick), y: height - bottom + 24, "text-anchor": "middle" }, show(tick)));
  svg.append(make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, title || ""));
  rows.forEach((row, index) => {
    const y = index * each + (narrow ? 32 : 19), line = make("g", { class: `row c${row.colour} ${row.kind || ""}` });
    line.append(make("text", { class: "name", x: narrow ? left + 5 : left - 12, y: narrow ? y - 14 : y + 4, "text-anchor": narrow ? "start" : "end" }, fit(row.name, narrow && row.numbers ? 28 : 44)));
    if (row.numbers) line.append(make("text", { class: row.hollow ? "" : "name", x: narrow ? width - right : width - right + 14, y: narrow ? y - 14 : y + 4, "text-anchor": narrow ? "end" : "start" }, row.numbers));
    if (finite(row.low)) line.append(make("line", { class: row.numbers ? "whisker" : "stroke interval", x1: px(row.low), x2: px(row.high), y1: y, y2: y }));
    for (const [said, value] of row.seeds || []) line.append(make("circle", { class: "dot ring", cx: px(value), cy: y, r: 4.5 }, make("title", {}, said)));
    line.append(marker(row.marker, px(row.value), y, 1.5, row.hollow ? "dot ring" : "dot", make("title", {}, row.said)));
    svg.append(line);
  });
  body.replaceChildren(svg);
  readMarks(figure, svg);
}

// ---- frames: a figure, its values, and ways to take both along

// A drawing function fills `.body` with an svg, and sets `figure.table`, a function that gives { head, rows }, and `figure.legend`,
// a list of { label, colour, marker, dash } for figures whose svg does not name its colours.
const frame = (title, metric) => dress(make("figure", { "data-metric": metric }, make("h3", {}, title), make("figcaption"), make("div", { class: "body" })), title, metric);

function dress(figure, title, metric) {
  figure.append(make("div", { class: "tip", role: "status", hidden: "" }));
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

// A line in a group's colour and dash with its marker, as in a figure.
const swatch = line => make("svg", { viewBox: "0 0 26 11", height: 11, class: `c${line.colour}`, "aria-hidden": "true" }, make("line", { class: `curve dash${line.dash || 0}`, x1: 1, x2: 25, y1: 6, y2: 6 }), marker(line.marker || 0, 13, 6));
const nameList = lines => make("ul", { class: "names" }, ...lines.map(line => make("li", {}, swatch(line), line.label)));

// ---- reading a figure: by pointer, by a tap, by arrow keys

function showTip(figure, box, ...content) { // `box`: what it is about, as places on the screen
  const tip = figure.querySelector(".tip"), here = figure.getBoundingClientRect(), middle = (box.left + box.right) / 2 - here.left;
  tip.replaceChildren(...content);
  tip.hidden = false;
  const beside = middle + tip.offsetWidth + 20 < here.width ? middle + 14 : middle - tip.offsetWidth - 14;
  tip.style.left = `${Math.max(4, Math.min(beside, here.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(0, Math.min(box.top - here.top + 8, here.height - tip.offsetHeight))}px`;
}

// A finger that goes leaves the values where they are, until it taps elsewhere; a mouse takes them along.
let tapped = null;
document.addEventListener("pointerdown", event => { if (tapped && !tapped.svg.contains(event.target)) tapped.hide(); });

function reads(svg, { moves, at, hide }) {
  svg.addEventListener("pointermove", at);
  svg.addEventListener("pointerdown", event => { tapped = { svg, hide }; at(event); });
  svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const found = moves();
    if (event.key === "Escape") hide();
    if (!(event.key in found)) return;
    event.preventDefault();
    found[event.key]();
  });
}

// Marks that say what they are in a title: arrow keys go from one to the next.
function readMarks(figure, svg) {
  const marks = all("title", svg).map(title => title.parentElement), said = marks.map(mark => mark.querySelector("title").textContent), tip = figure.querySelector(".tip");
  let place = -1;
  if (!marks.length) return;
  for (const mark of marks) { mark.querySelector("title").remove(); mark.setAttribute("data-said", said[marks.indexOf(mark)]); }
  svg.setAttribute("tabindex", 0);
  const hide = () => { tip.hidden = true; marks[place]?.classList.remove("current"); };
  const show = index => {
    hide();
    place = Math.max(0, Math.min(marks.length - 1, index));
    marks[place].classList.add("current");
    showTip(figure, marks[place].getBoundingClientRect(), said[place]);
  };
  const nearest = event => {
    const away = mark => { const box = mark.getBoundingClientRect(); return Math.hypot(Math.max(box.left - event.clientX, 0, event.clientX - box.right), Math.max(box.top - event.clientY, 0, event.clientY - box.bottom)); };
    const distances = marks.map(away), best = distances.reduce((found, value, index) => value < distances[found] ? index : found, 0);
    if (distances[best] < 24) show(best); else hide();
  };
  reads(svg, { at: nearest, hide, moves: () => ({ ArrowRight: () => show(place + 1), ArrowDown: () => show(place + 1), ArrowLeft: () => show(place - 1), ArrowUp: () => show(place - 1), Home: () => show(0), End: () => show(marks.length - 1) }) });
}

function valueTable({ head, rows }) {
  const line = (cells, kind) => make("tr", {}, ...cells.map(cell => make(kind, {}, typeof cell === "number" ? readable(cell) : String(cell ?? "—"))));
  const more = rows.length > 2000 ? make("p", { class: "count" }, `… and ${readable(rows.length - 2000)} rows more: the CSV has them all.`) : null;
  return make("div", {}, make("div", { class: "scroll values", tabindex: 0, role: "region", "aria-label": "Values" }, make("table", {}, make("thead", {}, line(head, "th")), make("tbody", {}, ...rows.slice(0, 2000).map(row => line(row, "td"))))), ...(more ? [more] : []));
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

const looks = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "paint-order", "opacity", "font-size", "font-family", "font-weight"];

// A text in lines of so many letters.
function lines(text, most) {
  const found = [""];
  for (const word of text.split(" ")) if (found.at(-1) && found.at(-1).length + word.length >= most) found.push(fit(word, most)); else found.push(`${found.pop()} ${fit(word, most)}`.trim());
  return found;
}

// The figure's svg by itself, as on light paper: looks become attributes. It stands alone: above it are the headline, what was run
// on what and with which seeds, and the names of the colours; below it what lines and bands are.
function drawnSvg(figure, title) {
  const source = all(".body svg", figure).filter(svg => svg.clientWidth > 60).at(-1);
  if (!source) return null;
  const root = document.documentElement, theme = root.dataset.theme, [, , width, height] = source.getAttribute("viewBox").split(" ").map(Number);
  const copy = make("svg"), legend = figure.legend.map(one => make("g", { class: `c${one.colour}` }, make("line", { class: `curve dash${one.dash || 0}`, x1: 0, x2: 24, y1: -4, y2: -4 }), marker(one.marker || 0, 12, -4), make("text", { class: "name", x: 30, y: 0 }, fit(one.label, 60))));
  const most = Math.floor((width - 28) / 6.6), about = lines([figure.closest("#forest, #finals, #learning, .audited-page") ? data.headline : "", data.about].filter(Boolean).join(" · "), most), said = lines(figure.querySelector("figcaption").textContent, most);
  let x = 14, y = 44 + 16 * about.length;
  legend.forEach((node, index) => {
    const room = 46 + 7.2 * Math.min(60, figure.legend[index].label.length);
    if (x > 14 && x + room > width) { x = 14; y += 20; }
    node.setAttribute("transform", `translate(${x} ${y})`);
    x += room;
  });
  const top = legend.length ? y + 14 : 34 + 16 * about.length, tall = height + top + 16 * said.length + 10;
  const rows = [...about.map((text, index) => make("text", { x: 14, y: 40 + 16 * index }, text)), ...said.map((text, index) => make("text", { x: 14, y: height + top + 14 + 16 * index }, text))];
  const heading = make("text", { class: "name heading", x: 14, y: 22 }, title), drawing = make("g", { transform: `translate(0 ${top})` }, ...[...source.childNodes].filter(node => !node.classList || !node.classList.contains("cross")).map(node => node.cloneNode(true)));
  const paper = make("rect", { class: "paper", x: 0, y: 0, width, height: tall });
  copy.append(make("desc", {}, figure.querySelector("figcaption").textContent), paper, heading, ...rows, ...legend, drawing);
  for (const [key, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${tall}`, width, height: tall })) copy.setAttribute(key, value);
  const hidden = make("div", { class: "away" }, copy);
  root.dataset.theme = "light";
  document.body.append(hidden); // looks are known only for what is part of the page
  for (const node of all("*", copy)) if (!["g", "desc", "title"].includes(node.tagName)) {
    const style = getComputedStyle(node);
    for (const look of looks) node.setAttribute(look, style.getPropertyValue(look));
  }
  for (const node of all("*", copy)) for (const name of ["class", "tabindex", "role", "data-said"]) node.removeAttribute(name);
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

// On paper everything is open, and closed again afterwards.
addEventListener("beforeprint", () => { for (const part of all("details:not([open])")) { part.open = true; part.dataset.shut = ""; } });
addEventListener("afterprint", () => { for (const part of all("details[data-shut]")) { part.open = false; delete part.dataset.shut; } });
document.getElementById("choose-theme").addEventListener("input", event => { document.documentElement.dataset.theme = event.target.value; });

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

// A click on a heading sorts a table by that column, largest first, and a second click turns it around. Long tables have a filter.
function sortTables() {
  const value = cell => { const text = cell.textContent.trim(), number = text.match(/^[+−-]?[\d.,]+(e[+−-]?\d+)?/i); return number ? Number(number[0].replace(/,/g, "").replace(/−/g, "-")) : text; };
  for (const region of all(".scroll[aria-label]")) {
    const body = region.querySelector("tbody"), rows = body ? [...body.rows] : [], heads = all("thead th", region);
    if (rows.length < 2) continue;
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", class: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const order = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
        const kind = one => Number(typeof one === "string");  // numbers before words, whichever comes first among them
        const sorted = rows.map(row => [value(row.cells[column]), row]).sort(([a], [b]) => kind(a) - kind(b) || order * (a < b ? -1 : a > b ? 1 : 0));
        body.append(...sorted.map(([, row]) => row));
      });
    });
    if (rows.length < 8) continue;
    const filter = make("input", { type: "search", placeholder: "Filter rows", "aria-label": `Filter ${region.getAttribute("aria-label")}` });
    filter.addEventListener("input", () => { for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()); });
    region.before(filter);
  }
}
