/** What a key does. Pure, so that it can be tested without a page. */

/** @typedef {"page"|"chart"|"typing"|"widget"} Focus what has the focus; a widget has its own arrows */

const ANYWHERE = new Map([
  ["w", "zoom-in"],
  ["s", "zoom-out"],
  ["a", "pan-left"],
  ["d", "pan-right"],
  ["p", "peak"],
  ["Home", "reset"],
  ["ArrowLeft", "previous"],
  ["ArrowRight", "next"],
  ["Escape", "escape"],
  [",", "event-back"],
  [".", "event-on"],
  ["/", "search"],
  ["?", "help"],
]);
const ON_CHART = new Map([
  ["ArrowUp", "zoom-in"],
  ["ArrowDown", "zoom-out"],
  ["PageUp", "pan-left"],
  ["PageDown", "pan-right"],
  ["End", "last"],
  ["Enter", "pin"],
  [" ", "pin"],
]);

/**
 * The action for a key, or null.
 * @param {{key: string, ctrlKey?: boolean, metaKey?: boolean, altKey?: boolean, shiftKey?: boolean}} event
 * @param {Focus} where
 * @returns {string|null}
 */
export function actionOf(event, where) {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (where === "typing") return key === "Escape" ? "escape" : null;
  if (where === "chart" && ON_CHART.has(key)) return ON_CHART.get(key) ?? null;
  if (where === "widget" && (key.startsWith("Arrow") || key === "Home")) return null;
  const action = ANYWHERE.get(key) ?? null;
  if (event.shiftKey && (action === "previous" || action === "next")) return `${action}-ten`;
  return action;
}

/**
 * What has the focus, for `actionOf`.
 * @param {Element|null} element
 * @returns {Focus}
 */
export function focusKind(element) {
  if (!element || !element.tagName) return "page";
  if (element.id === "chart-frame") return "chart";
  const tag = element.tagName.toLowerCase();
  // A select finds its options by letters that are typed.
  if (tag === "input" || tag === "textarea" || tag === "select") return "typing";
  if (["treeitem", "slider"].includes(element.getAttribute("role") ?? "")) return "widget";
  return "page";
}
