// Policies as points of a triangle, and regions of policies as convex polygons. A polygon is a list of policies.

const SIDE = 400; // of the triangle, in the drawing's units
const HEIGHT = (SIDE * Math.sqrt(3)) / 2;
const SMALLEST = 1e-4; // probability that a handle can be given: logarithms stay finite
const CORNERS = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]; // top, bottom left, bottom right
const RAYS = 240; // of each of two kinds, to draw a ball with

const add = (p, step, direction) => p.map((value, i) => value + step * direction[i]);

/** Policy → [x, y]. */
function toPoint([top, , right]) {
  return [SIDE * (right + top / 2), HEIGHT * (1 - top)];
}

/** [x, y] → numbers that sum to 1; outside the triangle some are negative. */
function fromPoint([x, y]) {
  const top = 1 - y / HEIGHT;
  const right = x / SIDE - top / 2;
  return [top, 1 - top - right, right];
}

/** The nearest policy that gives every token at least SMALLEST. */
function nearestPolicy(numbers) {
  const room = 1 - numbers.length * SMALLEST;
  const sorted = numbers.map((value) => value - SMALLEST).sort((x, y) => y - x);
  let shift = 0;
  for (let kept = 1; kept <= sorted.length; kept++) {
    const candidate = (sum(sorted.slice(0, kept)) - room) / kept;
    if (sorted[kept - 1] > candidate) shift = candidate;
  }
  return numbers.map((value) => Math.max(value - SMALLEST - shift, 0) + SMALLEST);
}

/** The part of a polygon where `excess(policy)`, linear in the policy, is not positive. */
function cut(polygon, excess) {
  return polygon.flatMap((p, i) => {
    const q = polygon[(i + 1) % polygon.length];
    const [here, there] = [excess(p), excess(q)];
    const kept = here <= 0 ? [p] : [];
    if (here < 0 !== there < 0 && here !== there) kept.push(add(p, here / (here - there), add(q, -1, p)));
    return kept;
  });
}

/** Policies whose probability of token `a` lies between two numbers. */
function strip(a, low, high) {
  return cut(cut(CORNERS, (p) => low - p[a]), (p) => p[a] - high);
}

/** Policies within `bound` of the centre, where `distance` is convex: the last policy inside on each of many rays. */
function ball(centre, distance, bound) {
  const angle = ([top, , right]) => Math.atan2(HEIGHT * top, SIDE * (right + top / 2));
  return rays(centre)
    .sort((one, other) => angle(one) - angle(other))
    .map((direction) => lastInside(centre, direction, (p) => distance(p) <= bound));
}

/** Directions from a policy: even in the drawing, even in the Fisher metric (round for small balls), and to the corners. */
function rays(centre) {
  const turn = (one, other) => Array.from({ length: RAYS }, (_, i) => {
    const angle = (2 * Math.PI * i) / RAYS;
    return one.map((value, j) => value * Math.cos(angle) + other[j] * Math.sin(angle));
  });
  const [x, y, z] = centre.map(Math.sqrt);
  const flat = Math.hypot(x, y);
  const fisher = turn([y / flat, -x / flat, 0], [(x * z) / flat, (y * z) / flat, -flat]); // unit vectors at right angles to √p
  return [
    ...turn([0, -1, 1], [2 / Math.sqrt(3), -1 / Math.sqrt(3), -1 / Math.sqrt(3)]),
    ...fisher.map(([u, v, w]) => [x * u, y * v, z * w]),
    ...CORNERS.map((corner) => add(corner, -1, centre)),
  ];
}

/** The furthest policy from the centre along a direction that is inside, by bisection. */
function lastInside(centre, direction, inside) {
  let low = 0;
  let high = stepsToEdge(centre, direction);
  const edge = add(centre, high * (1 - 1e-9), direction); // just short of it: no logarithm of 0
  if (inside(edge)) return edge;
  for (let step = 0; step < 30; step++) {
    const middle = (low + high) / 2;
    if (inside(add(centre, middle, direction))) low = middle;
    else high = middle;
  }
  return add(centre, low, direction);
}

/** How many times `direction` fits between a policy and the edge of the triangle. */
function stepsToEdge(policy, direction) {
  return Math.min(...direction.map((d, i) => (d < 0 ? -policy[i] / d : Infinity)));
}

/** The two ends of the probabilities of token `a` for which a convex distance from `centre` is within the bound. */
function interval(centre, distance, bound) {
  const end = (limit) => {
    let [inside, outside] = [centre, limit];
    for (let step = 0; step < 50; step++) {
      const middle = (inside + outside) / 2;
      if (distance(middle) <= bound) inside = middle;
      else outside = middle;
    }
    return inside;
  };
  return [end(0), end(1)];
}

/** Polygons → the `d` of an SVG path; of two, one inside the other, an even-odd fill leaves the space between them. */
function toPath(...polygons) {
  const points = (polygon) => polygon.map((p) => toPoint(p).map((value) => value.toFixed(2)).join(" ")).join("L");
  return polygons.filter((polygon) => polygon.length > 1).map((polygon) => `M${points(polygon)}Z`).join("");
}

/** Policies → the `d` of an open line through them. */
function toLine(policies) {
  return toPath(policies).slice(0, -1);
}
