// Draws a report's figures and answers its filters. Comes last.

const main = data.metrics.find(metric => metric.section === "learning"); // drawn wide, the others smaller

function swatches() {
  for (const span of all(".swatch")) {
    const group = data.groups[Number(span.dataset.group)];
    span.replaceChildren(swatch(group));
  }
}

function drawSmall(host, section, state, otherwise) {
  const metrics = data.metrics.filter(metric => metric.section === section && metric !== main);
  if (!host) return;
  if (!host.firstChild) host.append(...(metrics.length ? metrics.map(metric => frame(metric.title, metric.key)) : [make("p", { class: "empty" }, otherwise)]));
  metrics.forEach((metric, index) => drawCurves(host.children[index], metric, state));
}

function draw() {
  const state = chosen();
  for (const label of all("label[data-problem]", form)) label.hidden = Number(label.dataset.problem) !== state.problem;
  drawFinals(state);
  const learning = document.getElementById("learning");
  if (!learning.firstChild) learning.append(main ? frame(main.title, main.key) : make("p", { class: "empty" }, "Nothing was measured yet."));
  if (main) drawCurves(learning.firstChild, main, state);
  drawSmall(document.getElementById("learning-more"), "learning", state, "");
  drawSmall(document.getElementById("trust"), "region", state, "No metrics of the trust region were logged.");
  drawSmall(document.getElementById("motion-figures"), "motion", state, "");
  drawHistograms(state);
  drawTails(state);
}

for (const run of data.runs) for (const [key, column] of Object.entries(run.columns)) run.columns[key] = column.map(value => value === "inf" ? Infinity : value);
for (const name of ["env_steps", "tokens", "seconds"]) if (!data.runs.some(run => run.columns[name].some(value => value > 0)))
  for (const option of all(`select[name=axis] option[value=${name}]`)) { option.disabled = true; option.textContent += " (not logged)"; }
form.addEventListener("input", draw);
// What sticks to the top must not cover what a link leads to.
const clearance = () => document.documentElement.style.setProperty("--bar", getComputedStyle(form).position === "sticky" ? `${form.offsetHeight + 8}px` : "0px");
form.addEventListener("submit", event => event.preventDefault());
swatches();
tableButtons();
sortTables();
draw();
drawForest();
drawSweeps();
browseCompletions();
browseTokens();
let wide = document.documentElement.clientWidth;
new ResizeObserver(() => { const now = document.documentElement.clientWidth; if (now !== wide) { wide = now; draw(); drawForest(); drawSweeps(); clearance(); } }).observe(document.documentElement);
document.documentElement.dataset.ready = "yes";
clearance();
