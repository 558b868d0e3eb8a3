// What each method makes of the state: its region, the part without gradient, its verdict and its numbers.

const TOKENS = ["yes", "no", "maybe"];

const show = (value, digits = 3) => (Math.abs(value) >= 1000 ? value.toExponential(1) : value.toFixed(digits)).replace("-", "−");
const outward = (state) => (p) => state.advantage * (state.old[state.token] - p[state.token]); // ≤ 0 where (ρ − 1) Â ≥ 0

/** The half of the triangle that the advantage pushes into, without a region: where a mask or a clip leaves no gradient. */
function beyond(state, region) {
  return [cut(CORNERS, outward(state)), cut(region, outward(state))];
}

function clipView(state) {
  const { old, next, token, advantage, clip } = state;
  const rho = ratio(next, old, token);
  const acted = clipped(rho, advantage, clip);
  const region = strip(token, old[token] * (1 - clip), old[token] * (1 + clip));
  const outside = Math.abs(rho - 1) > clip;
  return {
    region,
    blocked: beyond(state, region),
    push: acted ? null : policyGradient(next, old, token, advantage),
    tone: acted ? "cut" : "pass",
    verdict: acted ? "Clipped: no gradient" : outside ? "Outside, on the way back: passes" : "Inside: passes",
    numbers: {
      [`ratio ρ of “${TOKENS[token]}”`]: show(rho),
      "allowed range": `${show(1 - clip)} … ${show(1 + clip)}`,
      "gradient’s weight": show(acted ? 0 : rho),
    },
  };
}

/** The policies that DPPO's rule leaves alone. */
function dppoRegion(old, token, rule, delta) {
  if (rule.estimator === "binary") {
    const distance = rule.divergence === "tv" ? binaryTv : binaryKl;
    return strip(token, ...interval(old[token], (q) => distance(old[token], q), delta));
  }
  if (rule.divergence === "kl") return ball(old, (q) => categoricalKl(old, q), delta);
  // With three tokens the largest difference is the sum of the other two, so TV = max |p − q|: three strips, a hexagon.
  return CORNERS.reduce(
    (polygon, _, i) => cut(cut(polygon, (q) => old[i] - delta - q[i]), (q) => q[i] - old[i] - delta),
    CORNERS,
  );
}

function dppoView(state) {
  const { old, next, token, advantage, rule } = state;
  const delta = state.delta[rule.divergence];
  const rho = ratio(next, old, token);
  const distance = divergence(next, old, token, rule);
  const acted = masked(distance, rho, advantage, delta);
  const region = dppoRegion(old, token, rule, delta);
  return {
    region,
    blocked: beyond(state, region),
    push: acted ? null : policyGradient(next, old, token, advantage),
    tone: acted ? "cut" : "pass",
    verdict: acted ? "Masked: no gradient" : distance > delta ? "Outside, on the way back: passes" : "Inside: passes",
    numbers: {
      [`ratio ρ of “${TOKENS[token]}”`]: show(rho),
      "divergence D": `${show(distance)} ${distance > delta ? ">" : "≤"} ${show(delta)}`,
      "gradient’s weight": show(acted ? 0 : rho),
    },
  };
}

function trollView(state) {
  const { old, next, token, advantage, bound } = state;
  const projection = projectCategoricalKl(next, old, bound);
  const held = retractLogits(next, old, bound, state.tokens);
  return {
    region: state.ball,
    blocked: [],
    push: trollGradient(next, old, token, advantage, bound),
    projection,
    held,
    tone: projection.active ? "moved" : "pass",
    verdict: projection.active ? "Outside: projected" : "Inside: unchanged",
    numbers: {
      "KL to old, before → after": `${show(projection.before)} → ${show(projection.after)}`,
      "dual η": show(projection.dual),
      "ratio, before → after": `${show(ratio(next, old, token))} → ${show(ratio(projection.policy, old, token))}`,
      "network held: its KL, step kept": `${show(held.after)}, ${show(100 * held.t, 0)} %`,
    },
  };
}

const VIEWS = { clip: clipView, dppo: dppoView, troll: trollView };
