import { useEffect, useState } from "preact/hooks";
import { type FeedState, feed } from "./feed";

/** The feed's state, drawn again with each frame, while `isOn`. */
export function useFeed(isOn = true): FeedState | undefined {
  const [, redraw] = useState(0);
  useEffect(() => (isOn ? feed.subscribe(() => redraw((n) => n + 1)) : undefined), [isOn]);
  return isOn ? feed.state : undefined;
}
