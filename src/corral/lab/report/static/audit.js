// The figures are drawn already: this lets them be read by pointer, tap and arrow keys, and taken along. Needs base.js.
for (const figure of all("figure")) {
  dress(figure, figure.querySelector("h3").textContent);
  const rows = all("[data-said], title", figure);
  figure.table = () => ({ head: ["what"], rows: [...new Set(rows.map(mark => mark.dataset.said || mark.textContent))].map(text => [text]) });
  for (const svg of all("svg[role=img]", figure)) readMarks(figure, svg);
}
tableButtons();
document.documentElement.dataset.ready = "yes";
