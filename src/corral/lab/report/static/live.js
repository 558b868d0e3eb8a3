// A live audit writes this page again: read it again, unless the reader does not want that. Needs base.js.
const reload = document.getElementById("reload");
let reloading;
const planReload = () => {
  clearTimeout(reloading);
  if (reload.checked) reloading = setTimeout(() => location.reload(), 1000 * data.live);
};
reload.addEventListener("change", planReload);
planReload();
