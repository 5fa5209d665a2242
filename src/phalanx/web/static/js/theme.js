// Runs before the first paint, so that a remembered theme does not flash the other one.
(() => {
  try {
    const theme = localStorage.getItem("phalanx.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be forbidden: the system's choice holds.
  }
})();
