/** Light, dark, or what the system says; remembered where the browser lets a page remember. */
import { byId } from "./dom.js";

/** @typedef {"light"|"dark"} Theme */

const THEME_KEY = "ampmem-theme";
const SYSTEM_DARK = "(prefers-color-scheme: dark)";

export const INKS = {
  light: { ink: "#17202e", quiet: "#566072", grid: "#e3e7ee", outline: "#17202e", back: "#ffffff", note: "#ffffff", warn: "#9a3d00" },
  dark: { ink: "#eef2f8", quiet: "#a9b4c4", grid: "#2b3441", outline: "#eef2f8", back: "#161d27", note: "#0f151d", warn: "#ffb066" },
};

function remembered() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

/** @param {string} theme */
function remember(theme) {
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // A page opened from a file or in a private window may not be allowed to; the theme still changes.
  }
}

/**
 * `light` or `dark`, as shown now.
 * @returns {Theme}
 */
export function shownTheme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia(SYSTEM_DARK).matches ? "dark" : "light";
}

/**
 * Puts the selector to work; `changed` is called whenever another theme is shown.
 * @param {() => unknown} changed
 * @param {string|null} asked a theme that is shown for now, and not remembered
 */
export function startTheme(changed, asked = null) {
  const select = byId("theme", HTMLSelectElement);
  /** @param {string} theme */
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  const before = asked ?? remembered();
  if (before === "light" || before === "dark") {
    select.value = before;
    apply(before);
  }
  select.addEventListener("change", () => {
    apply(select.value);
    remember(select.value);
    changed();
  });
  matchMedia(SYSTEM_DARK).addEventListener("change", changed);
}
