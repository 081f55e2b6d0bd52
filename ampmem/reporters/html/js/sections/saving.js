/** Buttons at the foot of each card that save its figure or copy its tables. */
import { make } from "../common/dom.js";
import { barsFigure } from "../figures/barsfigure.js";
/** @import { Chart, Picture, Plotly } from "../figures/figures.js" */

const WIDTH = 1200;
const SCALES = { svg: 1, png: 2 };
const TITLE_HEIGHT = 44;
const SAID_MS = 4000;
/** What the address asked for when the page was opened; later it says where the reader is. */
const ASKED = new URLSearchParams(location.hash.slice(1));
/** What a spreadsheet would take for a formula. */
const FORMULA = /^[=@]|^[-+](?=[^\d.])/;

/** @param {Element} card */
function chartOf(card) {
  const chart = card.querySelector(".chart.js-plotly-plot");
  return chart && /** @type {Chart} */ (chart);
}

/**
 * The tables of a card, except folded ones.
 * @param {Element} card
 */
function tablesOf(card) {
  return [...card.querySelectorAll("table")].filter((table) => !table.closest("details:not([open]), [hidden]"));
}

/**
 * The figure of a card as it stands alone: with a title, a legend, and a ground.
 * @param {Element} card
 * @returns {Picture|null} null where it has none
 */
function pictureOf(card) {
  const chart = chartOf(card);
  const bars = tablesOf(card).filter((table) => table.classList.contains("bars"));
  if (!chart && !bars.length) return null;
  const { color, fontFamily } = getComputedStyle(document.body);
  const ground = { paper_bgcolor: getComputedStyle(card).backgroundColor, font: { family: fontFamily, size: 13, color } };
  const text = card.querySelector("h1, h2")?.textContent ?? "";
  const title = { text: `<b>${text}</b>`, x: 0, xref: "container", y: 1, yref: "container", yanchor: "top", pad: { l: 16, t: 14 } };
  const named = { ...ground, width: WIDTH, title: { ...title, font: { size: 16, color } } };
  if (!chart) {
    const { data, layout } = barsFigure(bars, [...card.querySelectorAll(".legend .swatch")], TITLE_HEIGHT, ground.font);
    return { data, layout: { ...layout, ...named } };
  }
  const { layout } = chart;
  // A legend that lies down is above the plot, below the title.
  const above = layout.legend ? 2 * TITLE_HEIGHT : TITLE_HEIGHT;
  const height = layout.height + above;
  const margin = { ...layout.margin, t: layout.margin.t + above };
  return { data: chart.data, layout: { ...layout, ...named, height, margin, showlegend: true } };
}

/**
 * The cells of a table as texts, below its caption.
 * @param {HTMLTableElement} table
 */
function textsOf(table) {
  const rows = [...table.rows].map((row) =>
    [...row.cells]
      .filter((cell) => !cell.matches(".track, .field-open"))
      .map((cell) => cell.innerText.trim().replace(/\s+/g, " ").replace(FORMULA, "'$&")),
  );
  const caption = table.caption?.innerText || table.closest(".block")?.querySelector("h2, h3")?.textContent;
  return caption ? [[caption], ...rows] : rows;
}

/**
 * Copies rows as a text with tabs and as a table.
 * @param {string[][]} rows
 */
function copyRows(rows) {
  const cell = (/** @type {string} */ text) => Object.assign(document.createElement("td"), { textContent: text });
  const table = make("table", {}, ...rows.map((cells) => make("tr", {}, ...cells.map(cell))));
  const put = (/** @type {ClipboardEvent} */ event) => {
    event.clipboardData?.setData("text/plain", rows.map((cells) => cells.join("\t")).join("\n"));
    event.clipboardData?.setData("text/html", new XMLSerializer().serializeToString(table));
    event.preventDefault();
  };
  // The newer clipboard asks for a permission, which a page in a notebook's frame does not get.
  document.addEventListener("copy", put, { once: true });
  const done = document.execCommand("copy");
  document.removeEventListener("copy", put);
  return done;
}

/**
 * @param {string} text
 * @param {(button: HTMLButtonElement) => unknown} act
 */
function button(text, act) {
  const made = make("button", { type: "button" }, text);
  made.addEventListener("click", () => act(made));
  return made;
}

/** @param {Element} card */
function copyButton(card) {
  return button("Copy table", (made) => {
    const tables = tablesOf(card).map(textsOf);
    made.textContent = copyRows(tables.flatMap((rows, i) => (i ? [[], ...rows] : rows))) ? "Copied" : "Not allowed here";
    setTimeout(() => (made.textContent = "Copy table"), SAID_MS);
  });
}

/**
 * Puts the buttons below each card that is shown.
 * @param {Plotly|null} plotly null on a page without figures
 */
export function offerToSave(plotly) {
  for (const old of document.querySelectorAll(".take")) old.remove();
  for (const card of document.querySelectorAll("section.card:not([hidden])")) {
    const formats = plotly && pictureOf(card) ? /** @type {const} */ (["svg", "png"]) : [];
    const buttons = formats.map((format) =>
      button(`Save ${format.toUpperCase()}`, () => {
        const picture = pictureOf(card);
        const { width, height } = picture?.layout ?? {};
        return picture && plotly?.downloadImage(picture, { format, width, height, scale: SCALES[format], filename: `ampmem-${card.id}` });
      }),
    );
    if (tablesOf(card).length) buttons.push(copyButton(card));
    const name = card.querySelector("h1, h2")?.textContent ?? card.id;
    const group = make("div", { class: "take screen", role: "group", "aria-label": `Save or copy: ${name}` }, ...buttons);
    if (buttons.length) card.append(group);
  }
}

/**
 * In place of the page, the picture that its address asks for: `#picture=svg&of=timeline`.
 * @param {Plotly} plotly
 */
export async function showAskedPicture(plotly) {
  const format = ASKED.get("picture");
  if (format !== "svg" && format !== "png") return;
  const card = document.getElementById(ASKED.get("of") ?? "") ?? document.querySelector(".chart")?.closest(".card");
  const picture = card && !card.hidden ? pictureOf(card) : null;
  const { width, height } = picture?.layout ?? {};
  const image = picture ? await plotly.toImage(picture, { format, width, height, scale: SCALES[format] }) : "";
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "picture", textContent: image }));
}
