// Light or dark: as the system says, until somebody presses the button. Runs before the first paint.
"use strict";
(() => {
  const NAME = "diffuse.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try { return localStorage.getItem(NAME); } catch { return null; } // a browser may forbid it
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  if (chosen() === "light" || chosen() === "dark") root.dataset.theme = chosen();

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => button.setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem(NAME, root.dataset.theme); } catch { /* until the tab is closed, then */ }
      name();
    });
    dark.addEventListener("change", name);
    name();
  });
})();
