/** Plotly travels packed and is unpacked into a script element, which the page's policy allows by its hash. */
import { byId } from "../common/dom.js";
import { bytesOfBase64, inflated } from "../data/decode.js";
/** @import { Plotly } from "./figures.js" */

/** @returns {Promise<Plotly>} */
export async function loadPlotly() {
  const packed = byId("plotly-packed");
  const source = new TextDecoder().decode(await inflated(bytesOfBase64(packed.textContent.trim())));
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  if (!window.Plotly) throw new Error("the drawing library did not start");
  packed.remove();
  script.remove();
  return window.Plotly;
}
