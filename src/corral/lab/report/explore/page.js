// The state, the drawing, and the hands and keys that change it.

const PRESETS = [
  {
    name: "A clear move",
    says: "All three agree that this is too far. Clip and DPPO stop the gradient; TROLL takes the policy back to the ball and goes on along its edge.",
    old: [0.5, 0.3, 0.2], next: [0.27, 0.58, 0.15], token: 1, advantage: 1,
  },
  {
    name: "A rare token rises",
    says: "“maybe” goes from 0.01 to 0.05. The policy has hardly moved, but the ratio is 5: the clip blocks a harmless step, the two divergences let it pass.",
    old: [0.6, 0.39, 0.01], next: [0.58, 0.37, 0.05], token: 2, advantage: 1,
  },
  {
    name: "A likely token falls",
    says: "“yes” goes from 0.99 to 0.80. A fifth of all probability has moved, but the ratio is 0.81: the clip passes a harmful step, the mask (δ = 0.15) and the projection do not.",
    old: [0.99, 0.006, 0.004], next: [0.8, 0.13, 0.07], token: 0, advantage: -1, delta: { tv: 0.15 },
  },
  {
    name: "The others move",
    says: "The sampled “yes” stays almost where it was while “no” and “maybe” change places. One token’s view sees nothing; all tokens’ does: choose it in the DPPO panel.",
    old: [0.4, 0.5, 0.1], next: [0.42, 0.1, 0.48], token: 0, advantage: 1,
  },
  {
    name: "On the way back",
    says: "“maybe” has risen too far, and a negative advantage now pulls it down. Clip and mask never block a step back; the projection does not look at the sign.",
    old: [0.45, 0.35, 0.2], next: [0.25, 0.2, 0.55], token: 2, advantage: -1,
  },
];
const DEFAULTS = { clip: 0.2, delta: { tv: 0.2, kl: 0.05 }, rule: { divergence: "tv", estimator: "binary" }, bound: 0.05, zoom: 1, tokens: 1, tail: 0.15, support: "old" };
const VIEW = { x: -26, y: -44, width: 452, height: 426 }; // of a whole triangle
const STEP = 0.01; // of an arrow key; five times that with Shift
const ARROWS = { ArrowUp: [1, -0.5, -0.5], ArrowDown: [-1, 0.5, 0.5], ArrowLeft: [0, 1, -1], ArrowRight: [0, -1, 1] };

const find = (selector, root = document) => root.querySelector(selector);
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];
let state;

/** A new element of a drawing, appended to its parent. */
function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.textContent = text;
  return parent.appendChild(element);
}

// ── the triangles ────────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Everything in a triangle, once, in the order in which it is painted. */
function buildTriangle(svg) {
  for (const share of [0.2, 0.4, 0.6, 0.8]) {
    CORNERS.forEach((_, i) => draw(svg, "path", { class: "grid", d: toPath(strip(i, share, share)) }));
  }
  draw(svg, "path", { class: "region" });
  draw(svg, "path", { class: "blocked", "fill-rule": "evenodd", fill: "url(#hatch)" });
  draw(svg, "path", { class: "frame", d: toPath(CORNERS) });
  if (svg.dataset.method !== "troll") draw(svg, "path", { class: "ball" });
  draw(svg, "path", { class: "way" });
  draw(svg, "path", { class: "pulled" });
  TOKENS.forEach((token, i) => {
    draw(svg, "text", { class: "corner", y: i ? 28 : -18, "data-token": i }, token);
  });
  draw(svg, "path", { class: "push" });
  draw(svg, "path", { class: "projected", d: "M0-9L9 0L0 9L-9 0Z" });
  if (svg.dataset.method === "troll") draw(svg, "circle", { class: "held", r: 13 });
  for (const [which, label] of [["old", "Old policy"], ["next", "New policy"]]) {
    const handle = draw(svg, "g", { class: `handle ${which}`, tabindex: 0, role: "slider", "aria-label": label });
    Object.assign(handle.dataset, { which });
    Object.entries({ valuemin: 0, valuemax: 1 }).forEach(([name, value]) => handle.setAttribute(`aria-${name}`, value));
    handle.setAttribute("aria-describedby", "keys");
    draw(handle, "circle", { class: "reach", r: 26 });
    draw(handle, "circle", { class: "halo", r: 15 });
    draw(handle, "circle", { class: "dot", r: 8 });
    listen(svg, handle);
  }
}

/** Drag by mouse, pen or finger; move by arrow keys. */
function listen(svg, handle) {
  const { which } = handle.dataset;
  const place = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [x, y];
  };
  let grip = null; // from the pointer to the handle's centre
  handle.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    const [centreX, centreY] = toPoint(state[which]);
    grip = [centreX - x, centreY - y];
    handle.setPointerCapture(event.pointerId);
    handle.focus({ preventScroll: true });
    event.preventDefault();
  });
  // A finger on a handle drags it and does not scroll the page; `touch-action` is not honoured inside every drawing.
  handle.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
  handle.addEventListener("pointermove", (event) => {
    if (grip === null) return;
    const [x, y] = place(event);
    change({ [which]: nearestPolicy(fromPoint([x + grip[0], y + grip[1]])) });
  });
  // What is zoomed stays where it is under a hand, and follows the old policy once that lets go.
  for (const end of ["pointerup", "pointercancel"]) handle.addEventListener(end, () => {
    if (grip !== null && which === "old" && state.zoom > 1) change({ centre: state.old });
    grip = null;
  });
  handle.addEventListener("keydown", (event) => {
    const direction = ARROWS[event.key];
    if (!direction) return;
    event.preventDefault();
    const moved = nearestPolicy(add(state[which], (event.shiftKey ? 5 * STEP : STEP) / state.zoom, direction));
    change({ [which]: moved, ...(which === "old" ? { centre: moved } : {}) });
  });
}

/** An arrow from a policy along a small step of it, of a length that says nothing and stays inside the triangle. */
function arrow(policy, gradient) {
  const move = moveOf(policy, gradient);
  const [from, toward] = [toPoint(policy), toPoint(add(policy, 1, move))];
  const size = Math.hypot(toward[0] - from[0], toward[1] - from[1]);
  if (size < 1e-9) return "";
  const unit = 1 / state.zoom, length = Math.min(58 * unit, size * stepsToEdge(policy, move));
  if (length < 14 * unit) return "";
  const [dx, dy] = [(toward[0] - from[0]) / size, (toward[1] - from[1]) / size];
  const at = (along, aside) => `${(from[0] + along * dx - aside * dy).toFixed(2)} ${(from[1] + along * dy + aside * dx).toFixed(2)}`;
  return `M${at(8 * unit, 0)}L${at(length, 0)}M${at(length - 8 * unit, -5 * unit)}L${at(length, 0)}L${at(length - 8 * unit, 5 * unit)}`;
}

/** The way from the old policy to its new one, between two values of t. */
function way(from, to) {
  return toLine(Array.from({ length: 41 }, (_, i) => geometricMixture(state.next, state.old, from + ((to - from) * i) / 40)));
}

function drawTriangle(svg, view) {
  const set = (selector, d) => find(selector, svg)?.setAttribute("d", d);
  const { projection } = view, { zoom } = state, [x, y] = toPoint(state.centre), here = zoom === 1 ? VIEW : { x: x - VIEW.width / zoom / 2, y: y - VIEW.height / zoom / 2, width: VIEW.width / zoom, height: VIEW.height / zoom };
  const sized = (policy) => `translate(${toPoint(policy)}) scale(${1 / zoom})`; // marks are as large as ever
  svg.setAttribute("viewBox", `${here.x} ${here.y} ${here.width} ${here.height}`);
  svg.classList.toggle("zoomed", zoom > 1);
  set(".region", toPath(view.region));
  set(".blocked", toPath(...view.blocked));
  set(".ball", toPath(state.ball));
  set(".way", projection ? way(0, projection.t) : "");
  set(".pulled", projection?.active ? way(projection.t, 1) : "");
  set(".push", view.push ? arrow(state.next, view.push) : "");
  find(".projected", svg).toggleAttribute("hidden", !projection?.active);
  if (projection) find(".projected", svg).setAttribute("transform", sized(projection.policy));
  if (view.held) {
    find(".held", svg).toggleAttribute("hidden", !view.held.active);
    find(".held", svg).setAttribute("transform", sized(view.held.policy));
  }
  findAll(".corner", svg).forEach((label) => {
    label.classList.toggle("sampled", Number(label.dataset.token) === state.token);
    label.setAttribute("transform", sized(CORNERS[label.dataset.token]));
  });
  findAll(".handle", svg).forEach((handle) => {
    const policy = state[handle.dataset.which];
    handle.setAttribute("transform", sized(policy));
    handle.setAttribute("aria-valuenow", policy[state.token].toFixed(4));
    handle.setAttribute("aria-valuetext", TOKENS.map((token, i) => `${token} ${show(policy[i])}`).join(", "));
  });
}

// ── words and numbers ────────────────────────────────────────────────────────────────────────────────────────────────────────

function fill(list, numbers) {
  list.replaceChildren(...Object.entries(numbers).map(([name, value]) => {
    const row = document.createElement("div");
    row.append(Object.assign(document.createElement("dt"), { textContent: name }));
    row.append(Object.assign(document.createElement("dd"), { textContent: value }));
    return row;
  }));
}

function fillShared() {
  const { old, next, token } = state;
  TOKENS.forEach((_, i) => {
    const row = find(`[data-row="${i}"]`);
    row.classList.toggle("sampled", i === token);
    [old[i], next[i], ratio(next, old, i)].forEach((value, column) => { row.cells[column + 1].textContent = show(value); });
  });
  fill(find("#moved"), {
    "total variation": show(categoricalTv(old, next)),
    "KL(new‖old)": show(categoricalKl(next, old)),
    "KL(old‖new)": show(categoricalKl(old, next)),
  });
  findAll("[data-rule]").forEach((cell) => {
    const [name, estimator] = cell.dataset.rule.split(" ");
    const distance = divergence(next, old, token, { divergence: name, estimator });
    find("output", cell).textContent = show(distance);
    cell.classList.toggle("over", distance > state.delta[name]);
  });
}

/** Sliders, buttons and choices as the state has them. */
function fillControls() {
  const { divergence: name, estimator } = state.rule;
  const values = { clip: state.clip, delta: state.delta[name], bound: state.bound, tail: state.tail };
  find("#delta").max = name === "tv" ? 0.6 : 0.3;
  find("#delta-name").textContent = name === "tv" ? "δ, total variation" : "δ, KL(old‖new)";
  Object.entries(values).forEach(([id, value]) => {
    find(`#${id}`).value = value;
    find(`#${id}-value`).textContent = value.toFixed(3);
  });
  const chosen = { token: state.token, advantage: state.advantage, rule: `${name} ${estimator}`, zoom: state.zoom, tokens: state.tokens, support: state.support };
  Object.entries(chosen).forEach(([group, value]) => { find(`input[name=${group}][value="${value}"]`).checked = true; });
  findAll("#presets button").forEach((button, i) => button.setAttribute("aria-pressed", i === state.preset));
  find("#says").textContent = state.preset === null ? "Your own two policies: try the sampled token, the sign of its advantage, and the bounds." : PRESETS[state.preset].says;
}

let pending;
/** One sentence for screen readers, once the hand has come to rest. */
function announce(views) {
  clearTimeout(pending);
  pending = setTimeout(() => {
    const sentence = ([name, { verdict, numbers }]) => `${name}: ${verdict}. ${Object.entries(numbers).map((one) => one.join(" ")).join(", ")}.`;
    find("#spoken").textContent = Object.entries(views).map(sentence).join(" ");
  }, 400);
}

function render() {
  fillShared();
  fillControls();
  const views = Object.fromEntries(Object.entries({ ...VIEWS, support: supportView }).map(([name, view]) => [name, view(state)]));
  Object.entries(views).forEach(([name, view]) => {
    const panel = find(`#${name}-panel`);
    if (name === "support") drawSupport(find("svg.bars", panel), view);
    else drawTriangle(find("svg.triangle", panel), view);
    find(".verdict", panel).textContent = view.verdict;
    find(".verdict", panel).dataset.tone = view.tone;
    fill(find(".numbers", panel), view.numbers);
  });
  announce(views);
}

/** The state with some of it changed, drawn; what a hand changes is no preset any more. */
function change(part) {
  state = { ...state, preset: null, ...part };
  state.ball = ball(state.old, (r) => categoricalKl(r, state.old), state.bound); // TROLL's region, shown in every panel
  find("#hatch").setAttribute("patternTransform", `rotate(45) scale(${1 / state.zoom})`);
  render();
  remember();
}

// ── the address says it all: whoever gets the link sees the same ─────────────────────────────────────────────────────────────

let kept;
function remember() {
  clearTimeout(kept);
  kept = setTimeout(() => history.replaceState(null, "", `#${address(state)}`), 200);
}

function address({ old, next, token, advantage, clip, delta, rule, bound, zoom, tokens, tail, support }) {
  const round = (value) => +value.toFixed(4);
  const parts = { old: old.map(round), new: next.map(round), token, advantage, clip, tv: delta.tv, kl: delta.kl, rule: [rule.divergence, rule.estimator], bound, zoom, tokens, tail, support };
  return Object.entries(parts).map(([name, value]) => `${name}=${value}`).join("&");
}

/** What an address says, as far as it makes sense; null if it names no two policies. */
function readAddress(text) {
  const given = Object.fromEntries(text.replace(/^#/, "").split("&").map((part) => part.split("=")));
  const policy = (name) => { const values = (given[name] || "").split(",").map(Number); return values.length === 3 && values.every((value) => value >= 0 && value <= 1) && sum(values) > 0 ? nearestPolicy(values.map((value) => value / sum(values))) : null; };
  const one = (name, options, otherwise) => options.find((option) => String(option) === given[name]) ?? otherwise;
  const between = (name, low, high, otherwise) => { const value = Number(given[name] || NaN); return value >= low && value <= high ? value : otherwise; };
  const [old, next, start] = [policy("old"), policy("new"), structuredClone(DEFAULTS)];
  if (!old || !next) return null;
  const [name, estimator] = one("rule", ["tv,binary", "tv,full", "kl,binary", "kl,full"], "tv,binary").split(",");
  return {
    old, next, centre: old, token: one("token", [0, 1, 2], 0), advantage: one("advantage", [1, -1], 1), preset: null, rule: { divergence: name, estimator },
    clip: between("clip", 0.01, 0.95, start.clip), bound: between("bound", 0.005, 0.5, start.bound), zoom: one("zoom", [1, 4, 16], 1),
    tokens: one("tokens", [1, 2, 5], start.tokens), tail: between("tail", 0, 0.195, start.tail), support: one("support", ["old", "union"], start.support),
    delta: { tv: between("tv", 0.005, 0.6, start.delta.tv), kl: between("kl", 0.005, 0.3, start.delta.kl) },
  };
}

function choosePreset(index) {
  const { old, next, token, advantage, delta } = PRESETS[index];
  const start = structuredClone(DEFAULTS);
  change({ ...start, old, next, centre: old, token, advantage, delta: { ...start.delta, ...delta }, preset: index });
}

// ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

findAll("svg.triangle").forEach(buildTriangle);
buildSupport(find("svg.bars"));
PRESETS.forEach(({ name }, index) => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
  button.addEventListener("click", () => choosePreset(index));
  find("#presets").append(button);
});
const keep = () => ({ preset: state.preset }); // bounds and estimators are ways of looking at the same preset
find("#clip").addEventListener("input", (event) => change({ ...keep(), clip: event.target.valueAsNumber }));
find("#bound").addEventListener("input", (event) => change({ ...keep(), bound: event.target.valueAsNumber }));
find("#tail").addEventListener("input", (event) => change({ ...keep(), tail: event.target.valueAsNumber }));
findAll("input[name=tokens]").forEach((input) => input.addEventListener("change", () => change({ ...keep(), tokens: Number(input.value) })));
findAll("input[name=support]").forEach((input) => input.addEventListener("change", () => change({ ...keep(), support: input.value })));
find("#delta").addEventListener("input", (event) =>
  change({ ...keep(), delta: { ...state.delta, [state.rule.divergence]: event.target.valueAsNumber } }));
findAll("input[name=token]").forEach((input) => input.addEventListener("change", () => change({ token: Number(input.value) })));
findAll("input[name=advantage]").forEach((input) => input.addEventListener("change", () => change({ advantage: Number(input.value) })));
findAll("input[name=rule]").forEach((input) => input.addEventListener("change", () => {
  const [name, estimator] = input.value.split(" ");
  change({ ...keep(), rule: { divergence: name, estimator } });
}));
findAll("input[name=zoom]").forEach((input) => input.addEventListener("change", () => change({ ...keep(), zoom: Number(input.value), centre: state.old })));
const open = () => { const found = readAddress(location.hash); if (found) change(found); return found; };
addEventListener("hashchange", open);
if (!open()) choosePreset(0);
