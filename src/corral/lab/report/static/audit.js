// Draws an audit's charts, which are data: axes, series of points, and cells. Needs base.js.

function axisOf({ scale, ends, ticks, names }, values, apart) {
  const known = ends || values.filter(value => finite(value) && (scale !== "log" || value > 0)), clamp = made => ({ ...made, at: value => Math.min(1, Math.max(0, made.at(value))) });
  if (names) return pixels => ({ at: place => (place + 0.5) / names.length, ticks: names.keys(), show: place => pixels > 440 || place % 2 === 0 ? names[place] : "" });
  if (scale === "root") return pixels => ({ ...rootScale(Math.max(...known) || 1e-4, pixels, apart), show: percents });
  if (!ticks) return pixels => clamp({ ...scaleOf(known.length ? known : [1e-3, 1], scale === "log", scale === "share", pixels, scale === "whole"), show: scale === "share" ? percents : readable });
  return pixels => {
    const at = value => Math.log(value / ends[0]) / Math.log(ends[1] / ends[0]), shown = [];
    for (const tick of ticks) if (at(tick) >= 0 && at(tick) <= 1 && shown.every(other => Math.abs(at(other) - at(tick)) * pixels > apart)) shown.push(tick);
    return clamp({ at, ticks: shown });
  };
}

// Numbers beside their points, filled points first; a number without a free place is left to the tip and the table.
function nameAll(svg, names, from, to) {
  const taken = [];
  for (const { x, y, name } of [...names].sort((a, b) => Boolean(a.hollow) - Boolean(b.hollow))) {
    const long = 7 * name.length, places = [[x + 8, y - 6], [x - 8 - long, y - 6], [x + 8, y + 14], [x - 8 - long, y + 14]];
    const free = places.find(([left, top]) => left >= from && left + long < to && taken.every(([a, b, end]) => left > end + 3 || left + long < a - 3 || Math.abs(top - b) > 12));
    if (!free) continue;
    taken.push([free[0], free[1], free[0] + long]);
    svg.append(make("text", { class: "name halo", x: free[0], y: free[1] }, name));
  }
}

function drawChart(figure, chart) {
  const body = figure.querySelector(".body"), points = chart.series.flatMap(one => one.points);
  figure.querySelector("figcaption").textContent = chart.caption;
  figure.table = () => ({ head: ["series", chart.x.title, chart.y.title, "what"], rows: chart.series.flatMap(one => one.points.map(point => [one.label, point.x, point.y, point.said])) });
  figure.legend = chart.series;
  const { svg, px, py, left, right, top, bottom, width, height, inner } = plane(body, {
    about: `${chart.title}. ${chart.caption}`, title: chart.x.title, height: chart.height, left: 62, top: 28,
    x: axisOf(chart.x, points.map(point => point.x), 40), y: axisOf(chart.y, points.map(point => point.y), 26),
  });
  svg.append(make("text", { x: 2, y: 12 }, `↑ ${chart.y.title}`));
  for (const { place: [column, row], share, kind, said } of chart.cells || []) {
    const [columns, rows] = chart.grid, wide = inner.width / columns, tall = inner.height / rows;
    svg.append(make("g", { class: kind }, make("rect", { class: "cell", x: (left + column * wide).toFixed(1), y: (height - bottom - (row + 1) * tall).toFixed(1), width: wide - 0.5, height: tall - 0.5, "fill-opacity": share.toFixed(2) }, make("title", {}, said))));
  }
  const names = [];
  for (const one of chart.series) {
    const group = make("g", { class: `c${one.colour}` });
    if (one.line) group.append(make("path", { class: `curve dash${one.dash}`, d: pathOf(one.points, point => px(point.x), point => py(point.y)) }));
    for (const { x, y, said, hollow, name } of one.points) {
      if (said) group.append(marker(one.marker, px(x), py(y), name && !hollow ? 1.3 : 1, hollow ? "dot ring" : "dot", make("title", {}, said)));
      if (name) names.push({ x: px(x), y: py(y), name, hollow });
    }
    svg.append(group);
  }
  nameAll(svg, names, left, width);
  for (const { x, y, said } of chart.bounds || []) svg.append(make("line", { class: "bound", ...(finite(x) ? { x1: px(x), x2: px(x), y1: top, y2: height - bottom } : { x1: left, x2: width - right, y1: py(y), y2: py(y) }) }, ...(said ? [make("title", {}, said)] : [])));
  const keys = chart.keys ? make("div", { class: "keys" }, ...chart.keys.map(([kind, words]) => make("span", { class: kind }, make("i"), words))) : nameList(chart.series);
  body.replaceChildren(keys, svg);
  readMarks(figure, svg);
}

for (const host of all("[data-charts]")) host.append(...data.charts[host.dataset.charts].map(chart => frame(chart.title)));
const drawCharts = () => { for (const host of all("[data-charts]")) data.charts[host.dataset.charts].forEach((chart, index) => drawChart(host.children[index], chart)); };
drawCharts();
let wide = document.documentElement.clientWidth;
new ResizeObserver(() => { const now = document.documentElement.clientWidth; if (now !== wide) { wide = now; drawCharts(); } }).observe(document.documentElement);
tableButtons();
document.documentElement.dataset.ready = "yes";
