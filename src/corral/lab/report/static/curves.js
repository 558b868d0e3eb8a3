// Learning curves, and where everybody ended. Needs base.js.

const form = document.getElementById("filters");
const axisNames = { update: "updates", step: "steps", rollouts: "rollouts", env_steps: "environment steps", tokens: "tokens", seconds: "seconds" };

// ---- what is chosen

function chosen() {
  const boxes = (name) => new Set(all(`input[name=${name}]:checked`, form).map(box => box.value));
  const picked = (name, fallback) => (form.elements[name] ? form.elements[name].value : "") || fallback;
  return { groups: boxes("group"), seeds: boxes("seed"), axis: picked("axis", "step"), band: picked("band", "interval"),
           smooth: picked("smooth", "yes") === "yes", problem: Number(picked("problem", 0)) };
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
    const whole = curveOf(runs, metric.key, state.axis), own = { label: group.label, short: group.short, colour: group.colour, marker: group.marker, dash: group.dash, smooth: state.smooth };
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

// ---- a figure with curves

function drawCurves(figure, metric, state) {
  const { series, infinite, ranges } = seriesOf(metric, state);
  const log = metric.log && series.some(one => one.points.some(point => point.y > 0 && finite(point.y)));
  const usable = value => finite(value) && (!log || value > 0);
  const body = figure.querySelector(".body");
  body.replaceChildren();
  figure.series = series;
  figure.table = () => ({ head: ["objective", "step", "at", "value", "low", "high"], rows: series.flatMap(one => one.points.map(point => [one.label, point.step, point.x, point.y, point.low, point.high])) });
  const xs = series.flatMap(one => one.points.map(point => point.x)), ys = series.flatMap(one => one.points.flatMap(point => [point.y, point.low, point.high])).filter(usable);
  const notes = problems.length > 1 ? [problems[state.problem], metric.caption] : [metric.caption];
  if (data.every > 1) notes.push(`a point stands for ${data.every} steps`);
  if (log) notes.push("logarithmic");
  if (infinite) notes.push(`${infinite} infinite values`);
  if (ranges && state.band === "interval" && metric.section === "learning") notes.push("band: range of the chosen seeds");
  figure.querySelector("figcaption").textContent = notes.join(" · ");
  if (!xs.length || !(ys.length || infinite)) {
    body.append(make("p", { class: "empty" }, "Nothing to draw for what is chosen."));
    return;
  }
  const learning = metric.section === "learning", wide = Math.max(body.clientWidth, 240), named = learning && wide > 640 && series.length < 9 && state.band !== "seeds";
  const limits = boundsOf(metric, state), heights = ys.length ? [...ys, ...limits.filter(value => value < 30 * Math.max(...ys))] : [0, 1];
  const drawn = plane(body, {
    about: `${metric.title} over ${axisNames[state.axis]}: ${series.map(one => one.label).join(", ")}`, title: axisNames[state.axis],
    height: learning ? Math.min(380, Math.max(250, wide * 0.45)) : 200, right: named ? Math.min(200, 30 + 7 * Math.max(...series.map(one => one.short.length))) : 14,
    x: pixels => scaleOf(xs, false, true, pixels * 0.85, state.axis !== "seconds"),
    y: pixels => ({ ...scaleOf(heights, log, metric.percent || metric.key === "entropy", pixels), ...(metric.percent ? { show: percents } : {}) }),
  });
  const { svg, px, py, left, right, top, width, inner } = drawn, seen = limits.filter(limit => drawn.up.at(limit) >= 0 && drawn.up.at(limit) <= 1);
  for (const limit of seen) svg.append(make("line", { class: "bound", x1: left, x2: width - right, y1: py(limit), y2: py(limit) }));
  for (const one of series) drawOne(svg, one, px, py, usable);
  for (const limit of seen) svg.append(make("text", { class: "name halo", ...clearPlace(`bound ${readable(limit)}`, py(limit), series, drawn, usable) }, `bound ${readable(limit)}`));
  if (named) nameEnds(svg, series, px, py, usable, top + inner.height);
  body.append(svg);
  figure.legend = named || series.length < 2 ? [] : series;
  hover(figure, svg, series, metric, state, drawn);
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
  const path = (points, value) => pathOf(points, point => px(point.x), point => py(value(point)));
  for (const piece of pieces.filter(points => points.length)) {
    const wide = piece.filter(point => usable(point.low) && usable(point.high) && point.high > point.low);
    if (wide.length > 1) group.append(make("path", { class: "area", d: `${path(piece, point => usable(point.high) ? point.high : point.y)}${path([...piece].reverse(), point => usable(point.low) ? point.low : point.y).replace("M", "L")}Z` }));
    const smooth = !one.thin && one.smooth && piece.length > 60;
    group.append(make("path", { class: `curve dash${one.dash}${one.thin ? " thin" : ""}${smooth ? " raw" : ""}`, d: path(piece, point => point.y) }));
    if (smooth) group.append(make("path", { class: `curve dash${one.dash}`, d: path(smoothed(piece), point => point.y) }));
    const every = Math.max(1, Math.ceil(piece.length / 12)), drawn = smooth ? smoothed(piece) : piece; // on long lines a marker now and then
    if (!one.thin) drawn.forEach((point, index) => { if (index % every === 0 || index === drawn.length - 1) group.append(marker(one.marker, px(point.x), py(point.y), piece.length < 26 ? 0.85 : 1)); });
  }
  svg.append(group);
}

// The mean of a point's neighbours, a twentieth of the line to either side; fewer towards its ends.
function smoothed(points) {
  const reach = Math.max(1, Math.round(points.length / 40));
  return points.map((point, index) => { const near = Math.min(reach, index, points.length - 1 - index), part = points.slice(index - near, index + near + 1); return { ...point, y: part.reduce((sum, one) => sum + one.y, 0) / part.length }; });
}

// Where the region ends: bounds that are a KL, on figures of a KL.
const boundsOf = (metric, state) => metric.key.startsWith("tr/kl") ? [...new Set(visibleGroups(state).map(group => group.bound).filter(finite))] : [];

// The place of a text along a horizontal line, above or below it, that the fewest points of the curves are in.
function clearPlace(text, line, series, { px, py, left, top, inner }, usable) {
  const long = 7 * text.length, spots = series.flatMap(one => one.points.filter(point => usable(point.y)).flatMap((point, index, points) => {
    const next = points[Math.min(index + 1, points.length - 1)]; // and places between two points
    return [0, 0.25, 0.5, 0.75].map(share => [px(point.x) + share * (px(next.x) - px(point.x)), py(point.y) + share * (py(next.y) - py(point.y))]);
  }));
  let best = null;
  for (const x of [left + inner.width - long - 2, left + 4, left + (inner.width - long) / 2]) for (const y of [line - 5, line + 14]) {
    if (y < top + 8 || y > top + inner.height) continue;
    const met = spots.filter(([a, b]) => a > x - 4 && a < x + long + 4 && b > y - 14 && b < y + 5).length;
    if (!best || met < best.met) best = { met, x, y };
  }
  return best ? { x: best.x, y: best.y } : { x: left + 4, y: line + 14 };
}

// Names at the ends of the curves, moved apart where they would overlap: then a line leads to them.
function nameEnds(svg, series, px, py, usable, lowest) {
  const ends = series.map(one => ({ one, point: one.points.filter(point => usable(point.y)).at(-1) })).filter(({ point }) => point)
    .map(({ one, point }) => ({ one, x: px(point.x), at: py(point.y), y: py(point.y) + 4 })).sort((a, b) => a.y - b.y);
  ends.forEach((end, index) => { if (index) end.y = Math.max(end.y, ends[index - 1].y + 14); });
  for (let index = ends.length - 1, floor = lowest; index >= 0; index -= 1, floor -= 14) ends[index].y = Math.min(ends[index].y, floor);
  for (const { one, x, at, y } of ends) svg.append(make("g", { class: `c${one.colour}` }, Math.abs(y - 4 - at) > 3 ? make("path", { class: "stroke leader", d: `M${x + 5} ${at}L${x + 14} ${y - 4}` }) : null, make("text", { class: "name", x: x + (Math.abs(y - 4 - at) > 3 ? 17 : 9), y }, fit(one.short, 26))));
}

// Pointer, taps and arrow keys move a line over the figure; the values below it are shown, and read out.
function hover(figure, svg, series, metric, state, { px, top, inner, width }) {
  const tip = figure.querySelector(".tip"), cross = make("line", { class: "cross", y1: top, y2: top + inner.height, visibility: "hidden" });
  const xs = [...new Set(series.flatMap(one => one.points.map(point => point.x)))].sort((a, b) => a - b), unit = metric.unit || axisNames[state.axis];
  let place = -1;
  svg.append(cross);
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  const show = index => {
    place = Math.max(0, Math.min(xs.length - 1, index));
    const at = xs[place], reach = (xs.at(-1) - xs[0]) / 40 || 1;
    const rows = series.map(one => ({ one, point: one.points.reduce((best, point) => Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best) }))
      .filter(({ point }) => Math.abs(point.x - at) <= reach).sort((a, b) => b.point.y - a.point.y).slice(0, 14);
    cross.setAttribute("x1", px(at)); cross.setAttribute("x2", px(at)); cross.setAttribute("visibility", "visible");
    showTip(figure, cross.getBoundingClientRect(), make("b", {}, `${readable(at)} ${unit}`), ...rows.map(({ one, point }) => {
      const band = point.high > point.low && finite(point.high) ? ` [${readable(point.low, metric.percent)} … ${readable(point.high, metric.percent)}]` : "";
      return make("div", { class: `row c${one.colour}` }, make("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true" }, marker(one.marker || 0, 0, 0)), make("span", {}, one.label), readable(point.y, metric.percent) + band);
    }));
  };
  const at = event => {
    const box = svg.getBoundingClientRect(), wanted = (event.clientX - box.left) * width / box.width;
    show(xs.reduce((best, value, index) => Math.abs(px(value) - wanted) < Math.abs(px(xs[best]) - wanted) ? index : best, 0));
  };
  reads(svg, { at, hide, moves: () => ({ ArrowRight: () => show(place + 1), ArrowLeft: () => show(place - 1), Home: () => show(0), End: () => show(xs.length - 1) }) });
}

// ---- where everybody ended

function drawFinals(state) {
  const host = document.getElementById("finals"), rows = data.finals.filter(row => visibleGroups(state).some(group => group.key === row.group)).sort((a, b) => b.value - a.value); // the best first
  if (!host) return; // of a single run there is nothing to see
  if (!host.firstChild) host.append(frame(`Final ${data.measure.name}`));
  const figure = host.firstChild, body = figure.querySelector(".body");
  figure.querySelector("figcaption").textContent = `${problems.length > 1 ? `${problems[state.problem]} · ` : ""}small circles: seeds · line and large marker: interquartile mean of all seeds (of fewer than four, their mean) with its 95 % bootstrap interval`;
  figure.table = () => ({ head: ["objective", "seed", "final", "interquartile_mean", "low", "high"], rows: rows.flatMap(row => Object.entries(row.seeds).map(([seed, value]) => [data.groups[row.group].label, seed, value, row.value, row.low, row.high])) });
  if (!rows.length) { body.replaceChildren(make("p", { class: "empty" }, "No run that counts has ended.")); return; }
  const text = value => readable(value, data.measure.percent);
  drawRows(figure, rows.map(row => {
    const { label, short: name, colour, marker } = data.groups[row.group], seeds = Object.entries(row.seeds).filter(([seed]) => state.seeds.has(seed));
    return { ...row, name, colour, marker, seeds: seeds.map(([seed, value]) => [`${label}, seed ${seed}: ${text(value)}`, value]), said: `${label}: ${text(row.value)}${finite(row.low) ? `, 95 % interval ${text(row.low)} … ${text(row.high)}` : ""}` };
  }), { zero: data.measure.percent, show: data.measure.percent ? percents : readable,
    about: `Final ${data.measure.name}: ${rows.map(row => `${data.groups[row.group].label} ${text(row.value)}`).join(", ")}`,
    ends: rows.flatMap(row => [...Object.values(row.seeds), row.value, row.low, row.high]).filter(finite) });
}

// ---- who is ahead of whom, and by how much: a figure for each problem

function drawForest() {
  const host = document.getElementById("forest");
  if (!host) return;
  if (!host.firstChild) host.append(...data.forest.map(({ title }) => frame(title)));
  all("figure", host).forEach((figure, index) => {
    const { rows, ends, title, of } = data.forest[index], raw = data.tables.comparisons;
    figure.querySelector("figcaption").textContent = `differences of runs with equal seeds, ${of}: mean and Student's 95 % interval, which the sentences are about · filled: a claim that holds among all pairs (Holm) · hollow: no difference can be claimed`;
    figure.table = () => ({ head: Object.keys(raw[0]), rows: raw.map(row => Object.values(row)) });
    drawRows(figure, rows, { title: of, ends, about: `${title}: ${rows.map(row => `${row.name} ${row.numbers}`).join(", ")}`, show: tick => `${tick > 0 ? "+" : ""}${readable(tick)}` });
  });
}
