// A sweep: every measure over the swept setting, as curves and as a heat-map. Needs base.js.

const sweepMeasures = { final: "Final", area: "Mean over the run", greedy: "Greedy", collapsed: "Share of runs that collapsed", kl: "Mean KL" };

const middle = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const sweepValues = (line, index, measure) => line.cells[index][measure].map(value => value === "inf" ? Infinity : value === "-inf" ? -Infinity : value).filter(finite);
const sweepPercent = measure => measure === "collapsed" || (measure !== "kl" && data.measure.percent);
const sweepTitle = measure => `${sweepMeasures[measure]}${["final", "area", "greedy"].includes(measure) ? ` ${measure === "greedy" ? "success" : data.measure.name}` : ""}`;

function sweepTable(sweep, measure) {
  return { head: ["objective", sweep.key, measure, "low", "high", "seeds", "usable", "usable_of_all", "chosen"], rows: sweep.lines.flatMap(line => sweep.values.map((value, index) => {
    const found = sweepValues(line, index, measure);
    return [line.label, value, middle(found), found.length ? Math.min(...found) : null, found.length ? Math.max(...found) : null, line.cells[index][measure].length, line.usable.includes(index), line.overall.includes(index), line.chosen === index];
  })) };
}

// Along the setting: mean over seeds, the range of the seeds as a band, a ring where the setting is usable, a star where it was chosen.
function drawSweepCurves(figure, sweep, measure) {
  const body = figure.querySelector(".body"), percent = sweepPercent(measure), width = Math.max(body.clientWidth, 240), height = Math.min(360, Math.max(240, width * 0.5));
  const series = sweep.lines.map(line => ({ ...line, points: sweep.values.map((value, index) => ({ index, found: sweepValues(line, index, measure) })).filter(point => point.found.length) })).filter(line => line.points.length);
  figure.querySelector("figcaption").textContent = "mean over seeds, band: their range · large dots: usable, for certain within 95 % of the contestant's own tuned setting · ★ chosen";
  figure.table = () => sweepTable(sweep, measure);
  figure.legend = sweep.lines;
  body.replaceChildren();
  if (!series.length) { body.append(make("p", { class: "empty" }, "Nothing was measured.")); return; }
  const numbers = series.flatMap(line => line.points.flatMap(point => point.found)), log = measure === "kl" && numbers.every(value => value > 0);
  // Numbers along the axis; "auto" has a place of its own to the right of them, and no line leads there.
  const axis = sweep.values.filter(finite), beside = sweep.values.length > axis.length ? 56 : 0;
  const spread = axis.every(value => value > 0) && axis.at(-1) / axis[0] >= 8 ? Math.log10 : value => value;
  const from = spread(axis[0]), reach = spread(axis.at(-1)) - from || 1;
  const { svg, px, py, right, top, bottom } = plane(body, {
    about: `${sweepTitle(measure)} over ${sweep.key}: ${series.map(line => line.label).join(", ")}`, title: sweep.key, height,
    x: pixels => ({ at: index => (index < axis.length ? 18 + (spread(axis[index]) - from) / reach * (pixels - 36 - beside) : pixels - 18) / pixels, ticks: sweep.names.keys(), show: index => sweep.names[index] }),
    y: pixels => ({ ...scaleOf(numbers, log, percent, pixels), show: percent ? percents : readable }),
  });
  if (beside) svg.append(make("line", { class: "grid", x1: width - right - 46, x2: width - right - 46, y1: top, y2: height - bottom }));
  for (const line of series) {
    const group = make("g", { class: `c${line.colour}` }), path = (points, value) => pathOf(points, point => px(point.index), point => py(value(point.found)));
    const along = line.points.filter(point => point.index < axis.length);
    if (along.length > 1 && along.some(point => point.found.length > 1)) group.append(make("path", { class: "area", d: `${path(along, found => Math.max(...found))}${path([...along].reverse(), found => Math.min(...found)).replace("M", "L")}Z` }));
    if (along.length) group.append(make("path", { class: `curve dash${line.dash}`, d: path(along, middle) }));
    for (const { index, found } of line.points) {
      if (index >= axis.length && found.length > 1) group.append(make("path", { class: "curve", d: `M${px(index)} ${py(Math.min(...found)).toFixed(1)}V${py(Math.max(...found)).toFixed(1)}` }));
      const x = px(index), at = py(middle(found)), said = `${line.label}, ${sweep.key} ${sweep.names[index]}: ${readable(middle(found), percent)}${line.usable.includes(index) ? ", usable" : ""}${line.chosen === index ? ", chosen" : ""}`;
      group.append(marker(line.marker, x, at, line.usable.includes(index) ? 1.4 : 0.7, "dot", make("title", {}, said)));
      if (line.chosen === index) group.append(make("text", { class: "mark", x, y: at - 9, "text-anchor": "middle" }, "★"));
    }
    svg.append(group);
  }
  body.append(nameList(sweep.lines), svg);
  readMarks(figure, svg);
}

// One row per contestant and other setting, one column per value; the stronger the colour, the higher the number.
function drawSweepHeat(figure, sweep, measure) {
  const body = figure.querySelector(".body"), percent = sweepPercent(measure), width = Math.max(body.clientWidth, 240);
  const means = sweep.lines.map(line => sweep.values.map((_, index) => middle(sweepValues(line, index, measure)))), known = means.flat().filter(finite);
  figure.querySelector("figcaption").textContent = "mean over seeds · outlined: usable, for certain within 95 % of the contestant's own tuned setting · ★ chosen";
  figure.table = () => sweepTable(sweep, measure);
  body.replaceChildren();
  if (!known.length) { body.append(make("p", { class: "empty" }, "Nothing was measured.")); return; }
  const low = Math.min(...known), high = Math.max(...known), each = 34, top = 6, narrow = width < 440, left = narrow ? 6 : Math.min(width * 0.4, 16 + 7.2 * Math.max(...sweep.lines.map(line => line.label.length))), row = narrow ? each + 20 : each;
  const height = top + sweep.lines.length * row + 40, cell = (width - left - 8) / sweep.values.length, few = cell < 58;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${sweepTitle(measure)} as a heat-map over ${sweep.key}. The table below has the values.` });
  sweep.lines.forEach((line, index) => {
    const y = top + index * row + (narrow ? 18 : 0), room = Math.floor((narrow ? width : left - 14) / 7), group = make("g", { class: `c${line.colour}` });
    group.append(make("text", { class: "name", x: narrow ? left : left - 10, y: narrow ? y - 5 : y + each / 2 + 4, "text-anchor": narrow ? "start" : "end" }, fit(line.label, room)));
    sweep.values.forEach((_, place) => {
      const value = means[index][place], x = left + place * cell, usable = line.usable.includes(place), share = finite(value) ? (high > low ? (value - low) / (high - low) : 1) : 0;
      const text = finite(value) ? (percent && few ? (100 * value).toFixed(0) : readable(value, percent).replace(/\.\d+ %/, few ? " %" : "$&")) : "—";
      group.append(make("rect", { class: "heat-cell", x: x + 1.5, y: y + 1.5, width: Math.max(cell - 3, 2), height: each - 3, rx: 3, opacity: (0.06 + 0.64 * share).toFixed(3) }, make("title", {}, `${line.label}, ${sweep.key} ${sweep.names[place]}: ${finite(value) ? readable(value, percent) : "not measured"}${usable ? ", usable" : ""}${line.chosen === place ? ", chosen" : ""}`)));
      if (usable) group.append(make("rect", { class: "heat-ring", x: x + 2.5, y: y + 2.5, width: Math.max(cell - 5, 2), height: each - 5, rx: 3 }));
      group.append(make("text", { class: "name", x: x + cell / 2, y: y + each / 2 + 4, "text-anchor": "middle" }, line.chosen === place ? `★ ${text}` : text));
    });
    svg.append(group);
  });
  sweep.names.forEach((name, place) => svg.append(make("text", { x: left + (place + 0.5) * cell, y: height - 20, "text-anchor": "middle" }, name)));
  svg.append(make("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, sweep.key));
  body.append(svg);
  readMarks(figure, svg);
}

function drawSweeps() {
  for (const host of all(".sweep-figures")) {
    const sweep = data.sweeps[Number(host.dataset.sweep)], own = document.querySelector(`.sweep-filters[data-sweep="${host.dataset.sweep}"]`), measure = own.elements.measure.value || "final";
    if (host.dataset.measure !== measure) host.replaceChildren(frame(`${sweepTitle(measure)} over ${sweep.key}`), frame(`${sweepTitle(measure)}, whole grid`));
    host.dataset.measure = measure;
    drawSweepCurves(host.children[0], sweep, measure);
    drawSweepHeat(host.children[1], sweep, measure);
  }
}

for (const own of all(".sweep-filters")) {
  own.addEventListener("input", drawSweeps);
  own.addEventListener("submit", event => event.preventDefault());
}
