/** What the actions of `common/keys.js` do to the timeline. */
/** @import { Timeline } from "./timeline.js" */

/** @type {Map<string, (timeline: Timeline) => void>} */
const ACTIONS = new Map([
  ["zoom-in", (timeline) => timeline.zoom(0.5)],
  ["zoom-out", (timeline) => timeline.zoom(2)],
  ["pan-left", (timeline) => timeline.pan(-0.25)],
  ["pan-right", (timeline) => timeline.pan(0.25)],
  ["peak", (timeline) => timeline.toPeak()],
  ["reset", (timeline) => timeline.reset()],
  ["previous", (timeline) => timeline.walk(-1)],
  ["next", (timeline) => timeline.walk(1)],
  ["previous-ten", (timeline) => timeline.walk(-10)],
  ["next-ten", (timeline) => timeline.walk(10)],
  ["last", (timeline) => timeline.walk(timeline.live.length)],
  ["pin", (timeline) => timeline.pinHere()],
  ["event-back", (timeline) => timeline.stepBy(-1)],
  ["event-on", (timeline) => timeline.stepBy(1)],
]);

/**
 * @param {Timeline} timeline
 * @param {string} action
 */
export function perform(timeline, action) {
  ACTIONS.get(action)?.(timeline);
}
