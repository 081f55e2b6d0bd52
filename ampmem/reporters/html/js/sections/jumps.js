/** The ways to the sections of the page, and which of them is in view. */
import { byId, fill, make } from "../common/dom.js";

const BELOW_BAR = 120;

/**
 * The sections that are shown and have a way to them.
 * @returns {HTMLElement[]}
 */
function shownSections() {
  return [...document.querySelectorAll("[data-jump]:not([hidden])")].filter((each) => each instanceof HTMLElement);
}

export function drawJumps() {
  fill(byId("jumps"), ...shownSections().map(({ id, dataset }) => make("a", { href: `#${id}` }, dataset.jump)));
}

/** Puts the button for the help to work. */
export function startHelp() {
  const help = byId("help", HTMLDialogElement);
  byId("help-open").addEventListener("click", () => help.showModal());
  return help;
}

/**
 * Whether the page has a section of this name to go to.
 * @param {string} id
 */
export function hasSection(id) {
  return shownSections().some((each) => each.id === id);
}

/**
 * Goes to a section.
 * @param {string} id
 * @param {ScrollBehavior} behavior
 */
export function jumpTo(id, behavior = "auto") {
  const target = byId(id);
  target.scrollIntoView({ block: "start", behavior });
  /** @type {HTMLElement|null} */
  const title = target.querySelector("h1, h2");
  title?.setAttribute("tabindex", "-1");
  title?.focus({ preventScroll: true });
}

/**
 * The section at the top of the window; empty at the top of the page. At the end of the page that is `before`, if it can be
 * seen: the last ones never reach the top.
 * @param {string} before
 */
export function sectionInView(before) {
  if (scrollY === 0) return "";
  const tops = shownSections().map((each) => ({ id: each.id, top: each.getBoundingClientRect().top }));
  const atEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
  const kept = tops.find(({ id, top }) => id === before && top < innerHeight - BELOW_BAR);
  if (atEnd && kept && kept.top >= 0) return before;
  // Two that stand side by side have one top: then it is the first, unless it was the other.
  const passed = tops.filter(({ top }) => top <= BELOW_BAR).sort((one, two) => two.top - one.top);
  const level = passed.filter(({ top }) => top === passed[0].top);
  return (level.find(({ id }) => id === before) ?? level[0])?.id ?? "";
}

/**
 * Marks the way to the section that is in view.
 * @param {string} id
 */
export function markJump(id) {
  for (const link of byId("jumps").querySelectorAll("a")) {
    if (link.getAttribute("href") === `#${id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}
