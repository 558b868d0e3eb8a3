"use strict";

// The maths: one function, one formula. A policy is an array of positive probabilities, `a` the index of the sampled token.

const sum = (values) => values.reduce((total, value) => total + value, 0);
const sampled = (index, a) => (index === a ? 1 : 0);

/** KL(p‖q) = Σ p log(p/q), in nats. */
function categoricalKl(p, q) {
  return sum(p.map((_, i) => p[i] * Math.log(p[i] / q[i])));
}

/** TV(p, q) = ½ Σ |p − q|. */
function categoricalTv(p, q) {
  return 0.5 * sum(p.map((_, i) => Math.abs(p[i] - q[i])));
}

/** KL of "this token or any other": (p, 1 − p) against (q, 1 − q), for two probabilities. */
function binaryKl(p, q) {
  return categoricalKl([p, 1 - p], [q, 1 - q]);
}

/** TV of "this token or any other": |p − q|, for two probabilities. */
function binaryTv(p, q) {
  return Math.abs(p - q);
}

/** ρ = π(a) / π_old(a). */
function ratio(next, old, a) {
  return next[a] / old[a];
}

/** PPO: the surrogate's gradient is gone once ρ has left [1 − ε, 1 + ε] along the advantage. */
function clipped(rho, advantage, epsilon) {
  return (advantage > 0 && rho > 1 + epsilon) || (advantage < 0 && rho < 1 - epsilon);
}

/** D(old, new) for DPPO: `divergence` "tv" or "kl" = KL(old‖new), `estimator` "binary" or "full". */
function divergence(next, old, a, rule) {
  if (rule.estimator === "binary") return (rule.divergence === "tv" ? binaryTv : binaryKl)(old[a], next[a]);
  return (rule.divergence === "tv" ? categoricalTv : categoricalKl)(old, next);
}

/** DPPO: m = 0 iff D > δ and (ρ − 1) Â > 0. */
function masked(distance, rho, advantage, delta) {
  return distance > delta && (rho - 1) * advantage > 0;
}

/** r_t ∝ old^(1−t) new^t: the path from the old policy (t = 0) to the new one (t = 1). */
function geometricMixture(next, old, t) {
  const weights = next.map((_, i) => old[i] ** (1 - t) * next[i] ** t);
  return weights.map((weight) => weight / sum(weights));
}

/** TROLL: argmin_r KL(r‖new) s.t. KL(r‖old) ≤ ε. KL(r_t‖old) rises with t; bisection finds where it is ε; η = (1 − t)/t. */
function projectCategoricalKl(next, old, epsilon) {
  const before = categoricalKl(next, old);
  if (before <= epsilon) return { policy: next, t: 1, dual: 0, active: false, before, after: before };
  let [inside, outside] = [0, 1];
  for (let step = 0; step < 60; step++) {
    const t = (inside + outside) / 2;
    if (categoricalKl(geometricMixture(next, old, t), old) <= epsilon) inside = t;
    else outside = t;
  }
  const policy = geometricMixture(next, old, inside);
  return { policy, t: inside, dual: (1 - inside) / inside, active: true, before, after: categoricalKl(policy, old) };
}

/**
 * The network itself held, as `deployed_bound` does, if its logits were its weights: back along the line to the old ones until
 * the mean KL(new‖old) of a batch is ε, where one token in `tokens` moves like this and the others stay. t is the share kept.
 */
function retractLogits(next, old, epsilon, tokens) {
  return projectCategoricalKl(next, old, epsilon * tokens); // a line in the logits is the geometric path
}

/** Ids of the k likeliest tokens. */
function likeliest(policy, k) {
  return policy.map((_, i) => i).sort((i, j) => policy[j] - policy[i]).slice(0, k);
}

/** Ids of a region's support: the old policy's k likeliest tokens, and in the "union" the new policy's as well. */
function supportIds(next, old, k, support) {
  return [...new Set([...likeliest(old, k), ...(support === "union" ? likeliest(next, k) : [])])];
}

/** Probabilities on a support, and the mass of all other tokens as one. */
function onSupport(policy, ids) {
  const rest = policy.filter((_, i) => !ids.includes(i));
  return [...ids.map((i) => policy[i]), ...(rest.length ? [sum(rest)] : [])];
}

/** −∂L/∂logits of L = −ρ Â: ρ Â (δ_ja − π_j). */
function policyGradient(next, old, a, advantage) {
  return next.map((p, j) => ratio(next, old, a) * advantage * (sampled(j, a) - p));
}

/** −∂L/∂logits of TROLL, α = 1: ρ̃ Â t (δ_ja − π̃_j (1 + z_a z_j)) − (1 − t) π_j (d_j − E_π d), z = d standardised under π̃. */
function trollGradient(next, old, a, advantage, epsilon) {
  const { policy, t, active } = projectCategoricalKl(next, old, epsilon);
  if (!active) return policyGradient(next, old, a, advantage);
  const d = next.map((p, i) => Math.log(p / old[i]));
  const mean = (weights) => sum(d.map((value, i) => weights[i] * value));
  const deviation = Math.sqrt(sum(d.map((value, i) => policy[i] * (value - mean(policy)) ** 2)));
  const z = d.map((value) => (value - mean(policy)) / deviation);
  return next.map((p, j) => {
    const along = ratio(policy, old, a) * advantage * t * (sampled(j, a) - policy[j] * (1 + z[a] * z[j]));
    return along - (1 - t) * p * (d[j] - mean(next));
  });
}

/** What a small step along `gradient` in the logits does to the probabilities: π_j (g_j − E_π g). */
function moveOf(policy, gradient) {
  const mean = sum(policy.map((p, i) => p * gradient[i]));
  return policy.map((p, i) => p * (gradient[i] - mean));
}
