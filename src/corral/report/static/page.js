"use strict";
// Draws a report's figures and answers its filters. Texts from runs only ever become text nodes.

const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters");
const axisNames = { update: "updates", tokens: "tokens", seconds: "seconds" };

// ---- small things

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const finite = value => typeof value === "number" && Number.isFinite(value);

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "rect", "title"].includes(name);
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

// ---- what is chosen

function chosen() {
  const boxes = (name) => new Set(all(`input[name=${name}]:checked`, form).map(box => box.value));
  const picked = (name, fallback) => (form.elements[name] ? form.elements[name].value : "") || fallback;
  return { groups: boxes("group"), seeds: boxes("seed"), axis: picked("axis", "update"), band: picked("band", "interval"),
           metric: picked("metric", null), problem: Number(picked("problem", 0)) };
}

const problems = [...new Set(data.groups.map(group => group.problem))];
const visibleGroups = state => data.groups.filter(group => group.problem === problems[state.problem] && state.groups.has(String(group.key)));
const runsOf = (group, state) => data.runs.filter(run => run.group === group.key && state.seeds.has(run.seed));

// ---- from runs to curves

// Seeds are joined step by step; a step's place on the axis of tokens or seconds is the mean over the seeds.
function curveOf(runs, metric, axis) {
  const steps = new Map();
  let infinite = 0;
  for (const { columns } of runs) columns[metric].forEach((value, index) => {
    if (value === null) return;
    const entry = steps.get(columns.step[index]) || steps.set(columns.step[index], { x: [], y: [] }).get(columns.step[index]);
    entry.x.push(columns[axis][index]);
    if (finite(value)) entry.y.push(value); else infinite += 1;
  });
  const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
  const points = [...steps].sort((a, b) => a[0] - b[0]).map(([step, entry]) => entry.y.length
    ? { step, x: mean(entry.x), y: interquartileMean(entry.y), low: Math.min(...entry.y), high: Math.max(...entry.y), count: entry.y.length }
    : { step, x: mean(entry.x), y: Infinity, low: Infinity, high: Infinity, count: 0 });
  return { points, infinite };
}

function seriesOf(metric, state) {
  const found = [];
  let infinite = 0, ranges = false;
  for (const group of visibleGroups(state)) {
    const runs = runsOf(group, state).filter(run => run.columns[metric.key].some(value => value !== null));
    if (!runs.length) continue;
    const whole = curveOf(runs, metric.key, state.axis), own = { label: group.label, colour: group.colour, dash: group.dash };
    infinite += whole.infinite;
    if (state.band === "seeds") {
      for (const run of runs) found.push({ ...own, label: `${group.label}, seed ${run.seed}`, thin: runs.length > 1, points: curveOf([run], metric.key, state.axis).points });
      continue;
    }
    const bands = (data.bands[metric.key] || {})[group.key];
    const everyone = runs.length === data.runs.filter(run => run.group === group.key).length;
    if (state.band === "interval" && bands && everyone) {
      const place = new Map(bands.step.map((step, index) => [step, index]));
      for (const point of whole.points) if (place.has(point.step)) {
        point.low = bands.low[place.get(point.step)];
        point.high = bands.high[place.get(point.step)];
      }
    } else if (runs.length > 1) ranges = true;
    found.push({ ...own, points: whole.points });
  }
  return { series: found, infinite, ranges };
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

// ---- a figure with curves

function drawCurves(figure, metric, state) {
  const { series, infinite, ranges } = seriesOf(metric, state);
  const log = metric.log && series.some(one => one.points.some(point => point.y > 0 && finite(point.y)));
  const usable = value => finite(value) && (!log || value > 0);
  const body = figure.querySelector(".body");
  body.replaceChildren();
  figure.series = series;
  const xs = series.flatMap(one => one.points.map(point => point.x)), ys = series.flatMap(one => one.points.flatMap(point => [point.y, point.low, point.high])).filter(usable);
  const notes = [metric.caption];
  if (data.every > 1) notes.push(`a point stands for ${data.every} steps`);
  if (log) notes.push("logarithmic");
  if (infinite) notes.push(`${infinite} infinite values`);
  if (ranges && state.band === "interval" && metric.section === "learning") notes.push("band: range of the chosen seeds");
  figure.querySelector("figcaption").textContent = notes.join(" · ");
  if (!xs.length || !(ys.length || infinite)) {
    body.append(make("p", { class: "empty" }, "Nothing to draw for what is chosen."));
    return;
  }
  const width = Math.max(body.clientWidth, 240), height = metric.section === "learning" ? Math.min(380, Math.max(250, width * 0.45)) : 200;
  const named = metric.section === "learning" && width > 640 && series.length < 9 && state.band !== "seeds";
  const left = 52, right = named ? Math.min(200, 22 + 7 * Math.max(...series.map(one => one.label.length))) : 14, top = 12, bottom = 38, inner = { width: width - left - right, height: height - top - bottom };
  const x = scaleOf(xs, false, true, inner.width * 0.6), y = scaleOf(ys.length ? ys : [0, 1], log, metric.percent || metric.key === "entropy", inner.height);
  const px = value => left + x.at(value) * inner.width, py = value => value === Infinity ? top + 3 : top + (1 - y.at(value)) * inner.height;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": `${metric.title} over ${axisNames[state.axis]}: ${series.map(one => one.label).join(", ")}. Arrow keys read the values.` });
  for (const tick of y.ticks) svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }),
    make("text", { x: left - 7, y: py(tick) + 4, "text-anchor": "end" }, metric.percent ? `${+(100 * tick).toFixed(4)} %` : readable(tick)));
  for (const tick of x.ticks) svg.append(make("text", { x: px(tick), y: height - bottom + 17, "text-anchor": "middle" }, readable(tick)));
  svg.append(make("text", { x: left + inner.width, y: height - 5, "text-anchor": "end" }, axisNames[state.axis]));
  for (const one of series) drawOne(svg, one, px, py, usable);
  if (named) nameEnds(svg, series, px, py, usable, top + inner.height);
  body.append(svg);
  hover(figure, svg, series, metric, state, { px, left, top, height: inner.height, width });
}

function drawOne(svg, one, px, py, usable) {
  const group = make("g", { class: `c${one.colour}` }), pieces = [[]];
  const gaps = one.points.slice(1).map((point, index) => point.step - one.points[index].step).sort((a, b) => a - b), usual = gaps[gaps.length >> 1];
  one.points.forEach((point, index) => {
    const gap = index && point.step - one.points[index - 1].step > 1.5 * usual;
    if (gap || !usable(point.y)) pieces.push([]);
    if (usable(point.y)) pieces.at(-1).push(point);
    else if (point.y === Infinity) group.append(make("text", { class: "mark", x: px(point.x), y: py(Infinity) + 8, "text-anchor": "middle" }, "▲"));
  });
  const path = (points, value) => points.map((point, index) => `${index ? "L" : "M"}${px(point.x).toFixed(1)} ${py(value(point)).toFixed(1)}`).join("");
  for (const piece of pieces.filter(points => points.length)) {
    const wide = piece.filter(point => usable(point.low) && usable(point.high) && point.high > point.low);
    if (wide.length > 1) group.append(make("path", { class: "area", d: `${path(piece, point => usable(point.high) ? point.high : point.y)}${path([...piece].reverse(), point => usable(point.low) ? point.low : point.y).replace("M", "L")}Z` }));
    group.append(make("path", { class: `curve dash${one.dash}${one.thin ? " thin" : ""}`, d: path(piece, point => point.y) }));
    if (piece.length < 26 && !one.thin) for (const point of piece) group.append(make("circle", { class: "dot", cx: px(point.x).toFixed(1), cy: py(point.y).toFixed(1), r: 3 }));
  }
  svg.append(group);
}

// Names at the ends of the curves, moved apart where they would overlap.
function nameEnds(svg, series, px, py, usable, lowest) {
  const ends = series.map(one => ({ one, point: one.points.filter(point => usable(point.y)).at(-1) })).filter(({ point }) => point)
    .map(({ one, point }) => ({ one, x: px(point.x) + 9, y: py(point.y) + 4 })).sort((a, b) => a.y - b.y);
  ends.forEach((end, index) => { if (index) end.y = Math.max(end.y, ends[index - 1].y + 14); });
  for (let index = ends.length - 1, floor = lowest; index >= 0; index -= 1, floor -= 14) ends[index].y = Math.min(ends[index].y, floor);
  for (const { one, x, y } of ends) svg.append(make("g", { class: `c${one.colour}` }, make("text", { class: "mark", x, y }, one.label.length > 26 ? `${one.label.slice(0, 25)}…` : one.label)));
}

// Pointer and arrow keys move a line over the figure; the values below it are shown, and read out.
function hover(figure, svg, series, metric, state, { px, left, top, height, width }) {
  const tip = figure.querySelector(".tip"), cross = make("line", { class: "cross", y1: top, y2: top + height, visibility: "hidden" });
  const xs = [...new Set(series.flatMap(one => one.points.map(point => point.x)))].sort((a, b) => a - b);
  let place = -1;
  svg.append(cross);
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  const show = index => {
    place = Math.max(0, Math.min(xs.length - 1, index));
    const at = xs[place], reach = (xs.at(-1) - xs[0]) / 40 || 1;
    const rows = series.map(one => ({ one, point: one.points.reduce((best, point) => Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best) }))
      .filter(({ point }) => Math.abs(point.x - at) <= reach).sort((a, b) => b.point.y - a.point.y).slice(0, 14);
    tip.replaceChildren(make("b", {}, `${readable(at)} ${axisNames[state.axis]}`), ...rows.map(({ one, point }) => {
      const band = point.high > point.low && finite(point.high) ? ` [${readable(point.low, metric.percent)} … ${readable(point.high, metric.percent)}]` : "";
      return make("div", { class: `row c${one.colour}` }, make("i"), make("span", {}, one.label), readable(point.y, metric.percent) + band);
    }));
    tip.hidden = false;
    cross.setAttribute("x1", px(at)); cross.setAttribute("x2", px(at)); cross.setAttribute("visibility", "visible");
    const ratio = svg.clientWidth / width, over = px(at) * ratio, room = figure.clientWidth;
    tip.style.left = `${Math.max(4, over + tip.offsetWidth + 30 < room ? over + 24 : over - tip.offsetWidth - 2)}px`;
    tip.style.top = `${svg.offsetTop + 14}px`;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), wanted = (event.clientX - box.left) * width / box.width;
    show(xs.reduce((best, value, index) => Math.abs(px(value) - wanted) < Math.abs(px(xs[best]) - wanted) ? index : best, 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const moves = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: xs.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

// ---- where everybody ended

function drawFinals(state) {
  const host = document.getElementById("finals"), rows = data.finals.filter(row => visibleGroups(state).some(group => group.key === row.group));
  if (!host.firstChild) host.append(frame(`Final ${data.measure.name}`));
  const figure = host.firstChild, body = figure.querySelector(".body");
  figure.querySelector("figcaption").textContent = "circles: seeds · line and diamond: interquartile mean of all seeds with its 95 % bootstrap interval";
  body.replaceChildren();
  if (!rows.length) { body.append(make("p", { class: "empty" }, "No run that counts has ended.")); return; }
  const width = Math.max(body.clientWidth, 240), narrow = width < 520, each = narrow ? 46 : 30, left = narrow ? 10 : Math.min(280, 20 + 7.2 * Math.max(...rows.map(row => data.groups[row.group].label.length))), right = 20, height = rows.length * each + 34;
  const scale = scaleOf(rows.flatMap(row => [...Object.values(row.seeds), row.value, row.low, row.high]).filter(finite), false, data.measure.percent, (width - left - right) * 0.5);
  const px = value => left + scale.at(value) * (width - left - right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Final ${data.measure.name}: ` + rows.map(row => `${data.groups[row.group].label} ${readable(row.value, data.measure.percent)}`).join(", ") });
  for (const tick of scale.ticks) svg.append(make("line", { class: "grid", x1: px(tick), x2: px(tick), y1: 4, y2: height - 26 }), make("text", { x: px(tick), y: height - 8, "text-anchor": "middle" }, data.measure.percent ? `${+(100 * tick).toFixed(4)} %` : readable(tick)));
  rows.forEach((row, index) => {
    const group = data.groups[row.group], y = index * each + (narrow ? 32 : 19), line = make("g", { class: `c${group.colour}` });
    line.append(make("text", { class: "name", x: narrow ? left : left - 12, y: narrow ? y - 14 : y + 4, "text-anchor": narrow ? "start" : "end" }, group.label.length > 38 ? `${group.label.slice(0, 37)}…` : group.label));
    if (finite(row.low)) line.append(make("line", { class: "stroke interval", x1: px(row.low), x2: px(row.high), y1: y, y2: y }));
    for (const [seed, value] of Object.entries(row.seeds)) if (state.seeds.has(seed)) line.append(make("circle", { class: "dot ring", cx: px(value), cy: y, r: 4.5 }, make("title", {}, `${group.label}, seed ${seed}: ${readable(value, data.measure.percent)}`)));
    line.append(make("path", { class: "dot", d: `M${px(row.value)} ${y - 7}l6 7l-6 7l-6 -7Z` }, make("title", {}, `${group.label}: ${readable(row.value, data.measure.percent)}`)));
    svg.append(line);
  });
  body.append(svg);
}

// ---- frames

function frame(title, metric) {
  const figure = make("figure", { "data-metric": metric }, make("h3", {}, title), make("figcaption"), make("div", { class: "body" }), make("div", { class: "tip", role: "status", hidden: "" }));
  if (metric) {
    const values = make("button", { type: "button", "aria-expanded": "false" }, "Values"), csv = make("button", { type: "button" }, "CSV"), out = make("div");
    values.addEventListener("click", () => { const open = out.firstChild; out.replaceChildren(...(open ? [] : [valueTable(figure)])); values.setAttribute("aria-expanded", String(!open)); });
    csv.addEventListener("click", () => save(`${metric.replace(/\W+/g, "_")}.csv`, figure.series.flatMap(one => one.points.map(point => [one.label, point.step, point.x, point.y, point.low, point.high]))));
    figure.append(values, csv, out);
  }
  return figure;
}

function valueTable(figure) {
  const rows = figure.series.flatMap(one => one.points.map(point => [one.label, readable(point.step), readable(point.x), readable(point.y), readable(point.low), readable(point.high)])).slice(0, 2000);
  const line = (cells, kind) => make("tr", {}, ...cells.map(cell => make(kind, {}, cell)));
  return make("div", { class: "scroll values", tabindex: 0 }, make("table", {}, make("thead", {}, line(["objective", "step", "at", "value", "low", "high"], "th")), make("tbody", {}, ...rows.map(row => line(row, "td")))));
}

function save(name, rows) {
  const cell = value => /[",\n\r]|^[=+@-]/.test(String(value)) && !finite(value) ? `"${String(value).replace(/^([=+@-])/, "'$1").replaceAll('"', '""')}"` : String(value);
  const text = [["objective", "step", "at", "value", "low", "high"], ...rows].map(row => row.map(cell).join(",")).join("\n");
  const link = make("a", { href: URL.createObjectURL(new Blob([text + "\n"], { type: "text/csv" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

// ---- completions and tokens

const shown = value => value === null || value === undefined ? "—" : readable(value === "inf" ? Infinity : value);
const nameOf = run => `${data.groups[data.runs[run].group].label}, seed ${data.runs[run].seed}`;

function options(select, pairs) {
  const before = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
  if (pairs.some(([value]) => String(value) === before)) select.value = before;
}

function browseCompletions() {
  const own = document.getElementById("completion-filters");
  if (!own) return;
  const { run, step, sign, text } = own.elements;
  options(run, [...new Set(data.completions.map(row => row.run))].map(index => [index, nameOf(index)]));
  const draw = () => {
    const steps = [...new Set(data.completions.filter(row => String(row.run) === run.value).map(row => row.step))];
    const wanted = steps.map(String).includes(step.value) ? step.value : String(steps.at(-1));
    options(step, steps.map(value => [value, value]));
    step.value = wanted;
    const found = data.completions.filter(row => String(row.run) === run.value && String(row.step) === wanted)
      .filter(row => sign.value === "" || (sign.value === "high" ? row.advantage > 0 : row.advantage < 0))
      .filter(row => `${row.prompt}\n${row.completion}`.toLowerCase().includes(text.value.toLowerCase()));
    document.getElementById("completion-count").textContent = `${found.length} of those kept of this step`;
    document.getElementById("completion-list").replaceChildren(...found.map(row => make("li", {},
      make("div", { class: "meta" }, make("span", {}, `reward ${shown(row.reward)}`), make("span", {}, `advantage ${shown(row.advantage)}`)),
      make("pre", { class: "prompt", dir: "auto" }, row.prompt), make("pre", { dir: "auto", tabindex: 0 }, row.completion))));
  };
  own.addEventListener("input", draw);
  own.addEventListener("submit", event => event.preventDefault());
  draw();
}

function browseTokens() {
  const own = document.getElementById("token-filters");
  if (!own) return;
  const select = own.elements.tokens, heat = document.getElementById("heat");
  options(select, data.tokens.map((row, index) => [index, `${nameOf(row.run)}, step ${row.step}: ${row.token.join("").slice(0, 40)}`]));
  const largest = data.tokens.flatMap(row => row.kl_before.filter(finite)).sort((a, b) => a - b), most = largest[Math.floor(0.995 * (largest.length - 1))] || 1;
  const draw = () => {
    const row = data.tokens[Number(select.value) || 0];
    heat.replaceChildren(...row.token.map((text, index) => {
      const kl = row.kl_before[index] === "inf" ? Infinity : row.kl_before[index], action = ["projected", "masked", "clipped"].includes(row.action[index]) ? row.action[index] : "";
      const after = row.kl_after ? `, after ${shown(row.kl_after[index])}` : "", ratio = row.log_ratio ? `, log ratio ${shown(row.log_ratio[index])}` : "";
      const node = make("span", { class: `token ${action}`, title: `${action || "kept"}: KL ${shown(kl)} nats${after}${ratio}` }, text);
      node.style.backgroundColor = `rgba(var(--heat), ${finite(kl) || kl === Infinity ? (0.75 * Math.min(1, Math.sqrt(Math.max(kl, 0) / most))).toFixed(3) : 0})`;
      return node;
    }));
  };
  own.addEventListener("input", draw);
  own.addEventListener("submit", event => event.preventDefault());
  draw();
}

// How many tokens went how far, before (full) and after (hollow) the region acted.
function drawHistogram(state) {
  const host = document.getElementById("histogram");
  if (!host) return;
  if (!host.firstChild) host.append(frame("KL per token, before and after"));
  const figure = host.firstChild, body = figure.querySelector(".body"), shownGroups = new Set(visibleGroups(state).map(group => group.key));
  const rows = data.tokens.filter(row => shownGroups.has(data.runs[row.run].group) && state.seeds.has(data.runs[row.run].seed));
  const before = rows.flatMap(row => row.kl_before), after = rows.flatMap(row => row.kl_after || row.kl_before), edges = [];
  for (let power = -7; power <= 2; power += 0.5) edges.push(power);
  const counts = values => edges.map(edge => values.filter(value => finite(value) && value > 0 && Math.floor(2 * Math.log10(Math.max(value, 1e-7))) / 2 === edge).length);
  const full = counts(before), hollow = counts(after), most = Math.max(...full, ...hollow, 1);
  figure.querySelector("figcaption").textContent = `${before.length} tokens of the chosen runs · filled: as the network wants it · outlined: after the projection, where there is one · logarithmic both ways`;
  const width = Math.max(body.clientWidth, 240), height = 220, left = 44, bottom = 36, each = (width - left - 10) / edges.length;
  const py = count => 10 + (height - bottom - 10) * (1 - (count ? Math.log10(count) + 0.3 : 0) / (Math.log10(most) + 0.3));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Histogram of the KL of ${before.length} tokens before and after projection` });
  for (let tick = 1; tick <= most; tick *= 10) svg.append(make("line", { class: "grid", x1: left, x2: width - 10, y1: py(tick), y2: py(tick) }), make("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, readable(tick)));
  edges.forEach((edge, index) => {
    const bar = (count, kind, shift) => count && svg.append(make("g", { class: "c0" }, make("rect", { class: `bar ${kind}`, x: left + index * each + shift * each * 0.45 + 1, width: Math.max(each * 0.42, 1), y: py(count), height: height - bottom - py(count) }, make("title", {}, `${count} tokens, KL ${readable(10 ** edge)}…${readable(10 ** (edge + 0.5))}${kind ? " after" : " before"}`))));
    bar(full[index], "", 0); bar(hollow[index], "after", 1);
    if (Number.isInteger(edge)) svg.append(make("text", { x: left + index * each, y: height - 18, "text-anchor": "middle" }, readable(10 ** edge)));
  });
  svg.append(make("text", { x: width - 10, y: height - 3, "text-anchor": "end" }, "nats"));
  body.replaceChildren(svg);
}

// ---- the page

function swatches() {
  for (const span of all(".swatch")) {
    const group = data.groups[Number(span.dataset.group)];
    span.replaceChildren(make("svg", { viewBox: "0 0 26 11", height: 11, class: `c${group.colour}`, "aria-hidden": "true" }, make("line", { class: `curve dash${group.dash}`, x1: 1, x2: 25, y1: 6, y2: 6 })));
  }
}

function draw() {
  const state = chosen();
  for (const label of all("label[data-problem]", form)) label.hidden = Number(label.dataset.problem) !== state.problem;
  drawFinals(state);
  const learning = document.getElementById("learning"), region = document.getElementById("trust"), main = data.metrics.find(metric => metric.key === state.metric);
  if (main) {
    if (!learning.firstChild || learning.firstChild.dataset.metric !== main.key) learning.replaceChildren(frame(main.title, main.key));
    drawCurves(learning.firstChild, main, state);
  } else learning.replaceChildren(make("p", { class: "empty" }, "Nothing was measured yet."));
  const others = data.metrics.filter(metric => metric.section === "region");
  if (!region.firstChild) region.append(...(others.length ? others.map(metric => frame(metric.title, metric.key)) : [make("p", { class: "empty" }, "No metrics of the trust region were logged.")]));
  others.forEach((metric, index) => drawCurves(region.children[index], metric, state));
  drawHistogram(state);
}

for (const run of data.runs) for (const [key, column] of Object.entries(run.columns)) run.columns[key] = column.map(value => value === "inf" ? Infinity : value);
for (const name of ["tokens", "seconds"]) if (!data.runs.some(run => run.columns[name].some(value => value > 0)))
  for (const option of all(`select[name=axis] option[value=${name}]`)) { option.disabled = true; option.textContent += " (not logged)"; }
form.addEventListener("input", draw);
form.addEventListener("submit", event => event.preventDefault());
document.getElementById("choose-theme").addEventListener("input", event => { document.documentElement.dataset.theme = event.target.value; });
swatches();
draw();
browseCompletions();
browseTokens();
let wide = document.documentElement.clientWidth;
new ResizeObserver(() => { const now = document.documentElement.clientWidth; if (now !== wide) { wide = now; draw(); } }).observe(document.documentElement);
document.documentElement.dataset.ready = "yes";
