/** What the figures are made from, and the part of plotly that draws them. */

/** A stretch of a horizontal axis. */
export interface View {
  low: number;
  high: number;
}

/** For plotly, which documents what may be in it. */
export interface Figure {
  data: object[];
  layout: object;
}

/** A figure that stands alone. */
export interface Picture extends Figure {
  layout: Record<string, unknown> & { width: number; height: number };
}

export interface Plotly {
  react(chart: HTMLElement, data: object[], layout: object, config: object): Promise<unknown>;
  downloadImage(picture: Figure, options: object): Promise<string>;
  toImage(picture: Figure, options: object): Promise<string>;
}

/** An element that plotly has drawn in. */
export interface Chart extends HTMLElement {
  data: object[];
  layout: { width: number; height: number; margin: { t: number }; legend?: object };
  on(event: "plotly_relayout", listener: (change: Record<string, unknown>) => void): void;
}

declare global {
  interface Window {
    Plotly?: Plotly;
    /** Draws the figures of a page that is made of its own script. */
    drawFigures?: (theme: string, width?: number) => Promise<unknown>;
  }
}

export interface PeakMark {
  x: number;
  bytes: number;
  label: string;
}

/** Where memory ran out: the bytes that there are in all, those in use, and those that were asked for on top. */
export interface FailureMark {
  x: number;
  available: number | null;
  used: number;
  segment: number;
  block: string;
}

/** What the timeline is drawn from. */
export interface Drawing {
  /** The places of the drawn instants. */
  x: Float64Array;
  /** Bytes at the drawn instants: one array for each category, then those of the layers above them. */
  series: Float64Array[];
  /** By series: whether it is to be seen. */
  shown: boolean[];
  /** By series: whether it ever has bytes. */
  present: boolean[];
  /** How many of the series are categories. */
  live: number;
  view: View;
  byTime: boolean;
  width: number;
  height: number;
  draggable: boolean;
  /** Where steps begin. */
  steps: number[];
  /** Where memory ran out. */
  failure: FailureMark | null;
  peak: PeakMark | null;
}
