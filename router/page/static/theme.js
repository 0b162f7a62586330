// Not a module: it runs before the page is drawn, so that a chosen theme does not flash.
"use strict";
(() => {
  let theme = "";
  try {
    theme = localStorage.getItem("baton.theme") || "";
  } catch {
    // storage is turned off: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
