"use strict";
// The figures are drawn already; this only switches between light and dark.
document.getElementById("choose-theme").addEventListener("input", event => { document.documentElement.dataset.theme = event.target.value; });
document.documentElement.dataset.ready = "yes";
