/** Keeps the page's address up to date with where the reader is, and copies it. */
import { byId } from "../common/dom.js";
import { given } from "../common/given.js";
import { copyAddress, hashOfPlace, isFramed, placeOfHash, rememberHash } from "../common/permalink.js";
import { hasSection, jumpTo, markJump, sectionInView } from "./jumps.js";
/** @import { Place } from "../common/permalink.js" */

/** Browsers let a page change its address some hundred times in half a minute. */
const REMEMBER_MS = 250;
const COPIED_MS = 4000;

export class PageLink {
  #place;
  #section = "";
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #waiting;

  /**
   * @param {() => Omit<Place, "section">|null} place where the reader is; null before there is anything to see
   * @param {(place: Place) => void} go goes there, where the address has changed
   */
  constructor(place, go) {
    this.#place = place;
    window.addEventListener("hashchange", (event) => {
      // Where it has led, and not where the address is by now: what is written soon may have come between.
      const there = placeOfHash(new URL(event.newURL).hash);
      this.#at(hasSection(there.section) ? there.section : "");
      go(there);
    });
    document.addEventListener("scrollend", () => this.#at(sectionInView(this.#section)));
    byId("copy-link").addEventListener("click", () => this.#copy());
    byId("copy-link").hidden = isFramed();
    if (isFramed()) this.#stayHere();
  }

  /** In a notebook's frame the page has no address: a link within it would lead to the notebook's own. */
  #stayHere() {
    document.addEventListener("click", (event) => {
      const link = event.target instanceof Element ? event.target.closest('a[href^="#"]') : null;
      if (!link) return;
      event.preventDefault();
      const id = given(link.getAttribute("href")).slice(1);
      if (hasSection(id)) this.jump(id);
      else byId(id).scrollIntoView();
    });
  }

  /**
   * Goes to a section.
   * @param {string} id
   */
  jump(id) {
    if (!hasSection(id)) return;
    jumpTo(id);
    this.#at(id);
  }

  /**
   * Goes to the section that a page opens at, and again when what is drawn above it later moves it; until the reader
   * does something.
   * @param {string} id
   */
  arrive(id) {
    if (!hasSection(id)) return;
    const again = new ResizeObserver(() => {
      jumpTo(id, "instant");
      this.#at(id);
    });
    again.observe(byId("main"));
    for (const kind of ["wheel", "pointerdown", "keydown", "touchmove"]) {
      window.addEventListener(kind, () => again.disconnect(), { once: true, passive: true });
    }
    jumpTo(id, "instant");
    this.#at(id);
  }

  /** Puts into the address where the reader is, soon. */
  remember() {
    clearTimeout(this.#waiting);
    this.#waiting = setTimeout(() => this.#write(), REMEMBER_MS);
  }

  /** @param {string} section */
  #at(section) {
    this.#section = section;
    markJump(section);
    this.remember();
  }

  #write() {
    clearTimeout(this.#waiting);
    const place = this.#place();
    if (place) rememberHash(hashOfPlace({ ...place, section: this.#section }));
  }

  async #copy() {
    this.#write();
    const said = byId("copied");
    said.textContent = (await copyAddress()) ? "Copied" : "Copy it from the address bar";
    setTimeout(() => (said.textContent = ""), COPIED_MS);
  }
}
