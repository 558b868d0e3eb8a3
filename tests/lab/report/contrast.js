// Texts below 4.5 : 1 and edges of controls below 3 : 1 against what is behind them, as [what, text, ratio]. Marks are no text.
() => {
  const part = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2]);
  const parse = (text) => {
    const numbers = (text.match(/[\d.]+(e-?\d+)?/g) || [0, 0, 0, 0]).map(Number), scale = text.startsWith("color") ? 1 : 255;
    return [...numbers.slice(0, 3).map((value) => value / scale), numbers[3] ?? 1];
  };
  const behind = (node) => {
    const over = [];
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour[3] > 0) over.push(colour);
      if (colour[3] === 1) break;
    }
    return over.reduceRight((under, colour) => under.map((value, i) => value * (1 - colour[3]) + colour[i] * colour[3]), [1, 1, 1]);
  };
  const contrast = (one, other) => { const [a, b] = [luminance(one), luminance(other)]; return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
  const found = [], seen = [...document.querySelectorAll("body *")].filter((node) => node.getClientRects().length);
  for (const node of seen) {
    const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.textContent.trim()).join("");
    if (!text || /^[▲★]$/.test(text) || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), ratio = contrast(parse(node.tagName === "text" ? style.fill : style.color), behind(node));
    if (ratio < 4.5) found.push([node.tagName, text.slice(0, 30), ratio.toFixed(2)]);
  }
  for (const node of seen.filter((node) => node.matches("button, select, .choices span, input[type=search]"))) {
    const style = getComputedStyle(node), ratio = contrast(parse(style.borderTopColor), behind(node.parentElement));
    if (parseFloat(style.borderTopWidth) > 0 && ratio < 3) found.push([`edge of ${node.tagName}`, node.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return found;
}
