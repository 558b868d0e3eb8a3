// Completions, single tokens, and how far they wanted to go. Needs base.js and curves.js.

const shown = value => value === null || value === undefined ? "—" : readable(value === "inf" ? Infinity : value);
const nameOf = run => `${data.groups[data.runs[run].group].label}, seed ${data.runs[run].seed}`;

function options(select, pairs) {
  const before = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
  if (pairs.some(([value]) => String(value) === before)) select.value = before;
}

// Completions by prompt: of each the best, then the worst, then the others.
function byPrompt(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.prompt, [...(found.get(row.prompt) || []), row]);
  for (const own of found.values()) { own.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)); own.splice(1, 0, ...own.splice(-1)); }
  return [...found.values()];
}

const gapOf = own => own.length > 1 && finite(own[0].reward) && finite(own[1].reward) ? own[0].reward - own[1].reward : 0;

// Where a page opens: a right and a wrong answer to one prompt, as far apart as there are any; of equals the latest.
function mostTelling(rows) {
  const batches = new Map();
  for (const row of rows) batches.set(`${row.run} ${row.step}`, [...(batches.get(`${row.run} ${row.step}`) || []), row]);
  const pairs = [...batches.values()].flatMap(byPrompt).filter(own => gapOf(own) > 0);
  return pairs.reduce((best, own) => !best || gapOf(own) > gapOf(best) || (gapOf(own) === gapOf(best) && own[0].step > best[0].step) ? own : best, null)?.[0];
}

function browseCompletions() {
  const own = document.getElementById("completion-filters");
  if (!own) return;
  const { run, step, sign, text } = own.elements;
  options(run, [...new Set(data.completions.map(row => row.run))].map(index => [index, nameOf(index)]));
  const first = mostTelling(data.completions);
  if (first) { run.value = String(first.run); options(step, [[first.step, first.step]]); }
  const draw = () => {
    const steps = [...new Set(data.completions.filter(row => String(row.run) === run.value).map(row => row.step))];
    const wanted = steps.map(String).includes(step.value) ? step.value : String(steps.at(-1));
    options(step, steps.map(value => [value, value]));
    step.value = wanted;
    const found = data.completions.filter(row => String(row.run) === run.value && String(row.step) === wanted)
      .filter(row => sign.value === "" || (sign.value === "high" ? row.advantage > 0 : row.advantage < 0))
      .filter(row => `${row.prompt}\n${row.completion}`.toLowerCase().includes(text.value.toLowerCase()));
    document.getElementById("completion-count").textContent = `${found.length} of those kept of this step`;
    const ordered = byPrompt(found).sort((a, b) => (b[0].prompt === first?.prompt) - (a[0].prompt === first?.prompt)).flat();
    document.getElementById("completion-list").replaceChildren(...ordered.map(row => make("li", {},
      make("div", { class: "meta" }, make("span", {}, `reward ${shown(row.reward)}`), make("span", {}, `advantage ${shown(row.advantage)}`)),
      make("pre", { class: "prompt", dir: "auto" }, row.prompt), make("pre", { dir: "auto", tabindex: 0 }, row.completion))));
  };
  own.addEventListener("input", draw);
  own.addEventListener("submit", event => event.preventDefault());
  draw();
}

// The darker a token, the further it wanted to go. Pointer, touch and arrow keys read a token's numbers.
function browseTokens() {
  const own = document.getElementById("token-filters");
  if (!own) return;
  const { run, step, tokens } = own.elements, heat = document.getElementById("heat"), status = document.getElementById("heat-status"), about = document.getElementById("heat-about");
  const largest = data.tokens.flatMap(row => row.kl_before.filter(finite)).sort((a, b) => a - b), most = largest[Math.floor(0.995 * (largest.length - 1))] || 1;
  options(run, [...new Set(data.tokens.map(row => row.run))].map(index => [index, nameOf(index)]));
  const acted = entry => entry.action.filter(Boolean).length, first = data.tokens.reduce((best, entry) => acted(entry) > acted(best) ? entry : best);
  let row = null, current = -1;
  const wish = first.step;
  run.value = String(first.run);
  const read = index => {
    if (!row.token.length) return;
    if (heat.children[current]) heat.children[current].classList.remove("current");
    current = Math.max(0, Math.min(row.token.length - 1, index));
    heat.children[current].classList.add("current");
    const after = row.kl_after ? `, ${shown(row.kl_after[current])} after` : "", ratio = row.log_ratio ? `; log ratio ${shown(row.log_ratio[current])}` : "";
    status.textContent = `Token ${current + 1} of ${row.token.length}, “${row.token[current]}”: ${row.action[current] || "kept"}; KL ${shown(row.kl_before[current])} nats${after}${ratio}`;
  };
  const draw = () => {
    const mine = data.tokens.map((entry, index) => ({ entry, index })).filter(({ entry }) => String(entry.run) === run.value), steps = [...new Set(mine.map(({ entry }) => entry.step))];
    const wanted = steps.map(String).includes(step.value || String(wish)) ? step.value || String(wish) : String(steps.at(-1));
    options(step, steps.map(value => [value, value]));
    step.value = wanted;
    const here = mine.filter(({ entry }) => String(entry.step) === wanted).sort((a, b) => acted(b.entry) - acted(a.entry));
    options(tokens, here.map(({ entry, index }) => [index, `${acted(entry)} of ${entry.token.length} acted on: ${entry.token.join("").slice(0, 40)}`]));
    row = data.tokens[Number(tokens.value)];
    current = -1;
    status.textContent = "";
    about.textContent = `reward ${shown(row.reward)} · advantage ${shown(row.advantage)}${row.bound === null ? "" : ` · bound ${shown(row.bound)}`}`;
    heat.replaceChildren(...row.token.map((text, index) => {
      const kl = row.kl_before[index] === "inf" ? Infinity : row.kl_before[index], action = ["projected", "masked", "clipped"].includes(row.action[index]) ? row.action[index] : "";
      const node = make("span", { class: `token ${action}` }, text);
      node.style.backgroundColor = `rgba(var(--heat), ${finite(kl) || kl === Infinity ? (0.75 * Math.min(1, Math.sqrt(Math.max(kl, 0) / most))).toFixed(3) : 0})`;
      return node;
    }));
  };
  const point = event => { const index = [...heat.children].indexOf(event.target); if (index >= 0) read(index); };
  heat.addEventListener("pointerover", point);
  heat.addEventListener("click", point);
  heat.addEventListener("keydown", event => {
    const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: row.token.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    read(moves[event.key]);
  });
  own.addEventListener("input", draw);
  own.addEventListener("submit", event => event.preventDefault());
  draw();
}

// How many tokens went how far, before (full) and after (hollow) the region acted: a figure for each objective.
function drawHistograms(state) {
  const host = document.getElementById("histograms");
  if (!host) return;
  const groups = visibleGroups(state).map(group => ({ group, rows: data.tokens.filter(row => data.runs[row.run].group === group.key && state.seeds.has(data.runs[row.run].seed)) })).filter(({ rows }) => rows.length);
  const wanted = groups.map(({ group }) => group.key).join(" ");
  if (host.dataset.groups !== wanted) host.replaceChildren(...groups.map(({ group }) => frame(`KL per token: ${group.label}`)));
  host.dataset.groups = wanted;
  // Half decades, laid so that a projection's bound is an edge; what was projected onto it lies below, give or take its rounding.
  const bounded = groups.flatMap(({ rows }) => rows).find(row => row.kl_after && finite(row.bound) && row.bound > 0), origin = bounded ? Math.log10(bounded.bound) : 0;
  const bin = value => Math.floor(2 * (Math.log10(Math.min(Math.max(value / 1.002, 1e-7), 9e2)) - origin));
  const bins = groups.flatMap(({ rows }) => rows.flatMap(row => [...row.kl_before, ...(row.kl_after || [])])).filter(value => finite(value) && value > 0).map(bin);
  const edges = [], low = bins.reduce((least, value) => Math.min(least, value), Infinity), high = bins.reduce((most, value) => Math.max(most, value), -Infinity);
  for (let index = low; index <= high; index += 1) edges.push(origin + index / 2);
  groups.forEach(({ group, rows }, index) => drawHistogram(host.children[index], group, rows, edges, value => bin(value) - low));
}

// Which share of the tokens has a ratio further from 1 than that, either way: where clipping looks.
function drawTails(state) {
  const host = document.getElementById("tails");
  if (!host) return;
  if (!host.firstChild) host.append(frame("Ratio tails"));
  const figure = host.firstChild, body = figure.querySelector(".body");
  const series = visibleGroups(state).map(group => {
    const sizes = data.tokens.filter(row => row.log_ratio && data.runs[row.run].group === group.key && state.seeds.has(data.runs[row.run].seed))
      .flatMap(row => row.log_ratio.filter(value => value !== null).map(value => finite(value) ? Math.abs(value) : Infinity)).sort((a, b) => a - b);
    const points = [];
    for (let power = -3; power <= 1.001; power += 0.1) {
      const beyond = sizes.length - sizes.findIndex(size => size > 10 ** power);
      if (sizes.length && sizes.at(-1) > 10 ** power) points.push({ x: 10 ** power, y: beyond / sizes.length });
    }
    return { label: group.label, colour: group.colour, marker: group.marker, dash: group.dash, points, count: sizes.length };
  }).filter(one => one.points.length);
  figure.querySelector("figcaption").textContent = "share of tokens whose log ratio of new to old probability is beyond ±x · logarithmic both ways";
  figure.table = () => ({ head: ["objective", "log_ratio_beyond", "share_of_tokens", "tokens"], rows: series.flatMap(one => one.points.map(point => [one.label, point.x, point.y, one.count])) });
  figure.legend = series;
  if (!series.length) { body.replaceChildren(make("p", { class: "empty" }, "No token has moved, or no ratios were kept.")); return; }
  const drawn = plane(body, {
    about: `Ratio tails of ${series.map(one => one.label).join(", ")}`, title: "|log ratio|", height: 230, left: 58, top: 10,
    x: pixels => scaleOf(series.flatMap(one => one.points.map(point => point.x)), true, false, pixels * 0.6),
    y: pixels => ({ ...scaleOf(series.flatMap(one => one.points.map(point => point.y)), true, false, pixels), show: percents }),
  });
  const { svg, px, py } = drawn;
  for (const one of series) svg.append(make("g", { class: `c${one.colour}` }, make("path", { class: `curve dash${one.dash}`, d: pathOf(one.points, point => px(point.x), point => py(point.y)) })));
  body.replaceChildren(nameList(series), svg);
  hover(figure, svg, series, { percent: true, unit: "or more in |log ratio|" }, state, drawn);
}

function drawHistogram(figure, group, rows, edges, bin) {
  const body = figure.querySelector(".body"), projects = rows.some(row => row.kl_after), before = rows.flatMap(row => row.kl_before), after = rows.flatMap(row => row.kl_after || []);
  const counts = values => { const found = edges.map(() => 0); for (const value of values) if (finite(value) && value > 0) found[bin(value)] += 1; return found; };
  const full = counts(before), hollow = counts(after), most = Math.max(...full, ...hollow, 1), unmoved = before.filter(value => value !== null && value <= 0).length, bounds = new Set(rows.map(row => row.bound));
  figure.querySelector("figcaption").textContent = [several(before.length, "token"), projects ? "filled: as the network wants it, outlined: after the projection" : "as the network wants it", ...(unmoved ? [`${unmoved} that did not move at all are left out`] : []), "logarithmic both ways"].join(" · ");
  figure.table = () => ({ head: ["kl_from", "kl_to", "tokens_before", "tokens_after"], rows: edges.map((edge, index) => [10 ** edge, 10 ** (edge + 0.5), full[index], projects ? hollow[index] : null]) });
  if (!edges.length) { body.replaceChildren(make("p", { class: "empty" }, "No token has moved.")); return; }
  const bound = projects && bounds.size === 1 ? [...bounds][0] : null, powers = [], decades = [];
  for (let tick = 1; tick <= most; tick *= 10) decades.push(tick);
  for (let power = Math.ceil(edges[0]); power <= edges.at(-1) + 0.5; power += 1) if (edges.length < 13 || power % 2 === 0) powers.push(power);
  const { svg, px, py, left, width, height, bottom, inner } = plane(body, {
    about: `Histogram of the KL of ${several(before.length, "token")} of ${group.label}${projects ? ", before and after projection" : ""}`, title: "nats", height: 210, left: 44, right: 10, top: bound === null ? 10 : 24, bottom: 36,
    x: () => ({ at: power => 2 * (power - edges[0]) / edges.length, ticks: powers, show: power => readable(10 ** power) }),
    y: () => ({ at: count => (count ? Math.log10(count) + 0.3 : 0) / (Math.log10(most) + 0.3), ticks: decades }),
  }), each = inner.width / edges.length;
  const share = projects ? 0.45 : 0.9;
  edges.forEach((edge, index) => {
    const bar = (count, kind, shift) => count && svg.append(make("g", { class: `c${group.colour}` }, make("rect", { class: `bar ${kind}`, x: left + index * each + shift * each * share + 1, width: Math.max(each * share - 1.5, 1), y: py(count), height: height - bottom - py(count) }, make("title", {}, `${several(count, "token")}, KL ${readable(10 ** edge)}…${readable(10 ** (edge + 0.5))}${kind ? " after" : " before"}`))));
    bar(full[index], "", 0);
    if (projects) bar(hollow[index], "after", 1);
  });
  if (finite(bound) && bound > 0 && px(Math.log10(bound)) > left && px(Math.log10(bound)) < width - 10) svg.append(make("line", { class: "bound", x1: px(Math.log10(bound)), x2: px(Math.log10(bound)), y1: 8, y2: height - bottom }), make("text", { x: px(Math.log10(bound)) - 5, y: 16, "text-anchor": "end" }, `bound ${readable(bound)}`));
  body.replaceChildren(svg);
  readMarks(figure, svg);
}
