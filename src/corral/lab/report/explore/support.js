// What a region on a support of two tokens sees of a move among the others.

const TAIL = { tokens: ["yes", "no", "maybe", "perhaps"], old: [0.35, 0.25, 0.2, 0.2], k: 2 };
const BAR = { step: 100, width: 30, floor: 140, scale: 300 }; // in the drawing's units

/** The support, what it sees of the move and what there is to see, against TROLL's bound. */
function supportView({ tail, support, bound }) {
  const [yes, no, maybe, perhaps] = TAIL.old;
  const next = [yes, no, maybe + tail, perhaps - tail];
  const ids = supportIds(next, TAIL.old, TAIL.k, support);
  const seen = categoricalKl(onSupport(next, ids), onSupport(TAIL.old, ids));
  const there = categoricalKl(next, TAIL.old);
  const missed = there > bound && seen <= bound;
  return {
    next,
    ids,
    tone: missed ? "cut" : seen > bound ? "moved" : "pass",
    verdict: missed ? "Outside, and not seen" : seen > bound ? "Outside: seen" : "Inside",
    numbers: { "KL(new‖old) on the support": show(seen), "of all tokens": show(there), "bound ε of TROLL": show(bound) },
  };
}

function buildSupport(svg) {
  draw(svg, "rect", { class: "bucket", y: 4, height: BAR.floor + 22, rx: 8 });
  TAIL.tokens.forEach((token, i) => {
    const middle = (i + 0.5) * BAR.step, height = BAR.scale * TAIL.old[i];
    draw(svg, "rect", { class: "mark old", x: middle - BAR.width - 2, y: BAR.floor - height, width: BAR.width, height });
    draw(svg, "rect", { class: "mark next", x: middle + 2, width: BAR.width });
    draw(svg, "text", { class: "corner", x: middle, y: BAR.floor + 18 }, token);
  });
}

function drawSupport(svg, { next, ids }) {
  findAll(".next", svg).forEach((bar, i) => {
    bar.setAttribute("height", BAR.scale * next[i]);
    bar.setAttribute("y", BAR.floor - BAR.scale * next[i]);
  });
  const first = TAIL.tokens.findIndex((_, i) => !ids.includes(i)); // the tail is at the end: only "maybe" can rise
  find(".bucket", svg).setAttribute("x", first * BAR.step + 3);
  find(".bucket", svg).setAttribute("width", (TAIL.tokens.length - first) * BAR.step - 6);
}
