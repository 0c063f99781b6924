import { describe, expect, it } from "vitest";
import { layout } from "../src/blockmap";
import { what } from "../src/engine";
import { FeedState, type Frame, type Row } from "../src/feed";
import { fit } from "../src/images";
import { type Conversation, type Message, branch, siblings, tipBelow } from "../src/store";
import { type Timeline, duration, meaning, spans } from "../src/timeline";

function text(...bytes: number[]): string {
  return btoa(String.fromCharCode(...bytes));
}

const first: Frame = { frame: 7, is_whole: true, scope: "admin", at: 1000, counters: { generated_tokens: 10 }, cells: { size: 5, stride: 1, full: text(0, 0, 1, 2, 3) } };

describe("the feed", () => {
  it("applies runs of changes", () => {
    const state = new FeedState();
    expect(state.apply(first)).toBe(true);
    const next: Frame = { frame: 8, scope: "admin", at: 1500, counters: { generated_tokens: 60 }, cells: { size: 5, stride: 1, runs: [0, 1, 3, 2], data: text(9, 8, 7) } };
    expect(state.apply(next)).toBe(true);
    expect([...state.device.cells]).toEqual([9, 0, 1, 8, 7]);
    expect(state.latest.out).toBe(100);
  });

  it("keeps a map of host memory beside that of the device", () => {
    const state = new FeedState();
    expect(state.apply({ ...first, host_cells: { size: 3, stride: 1, full: text(0, 1, 2) } })).toBe(true);
    expect(state.apply({ frame: 8, scope: "admin", at: 1500, host_cells: { size: 3, stride: 1, runs: [2, 1], data: text(4) } })).toBe(true);
    expect([...state.host.cells]).toEqual([0, 1, 4]);
    expect([...state.device.cells]).toEqual([0, 0, 1, 2, 3]);
    expect(state.apply({ frame: 9, scope: "admin", at: 2000, host_cells: { size: 4, stride: 1 } })).toBe(false);
  });

  it("asks for a new start when a frame is missing", () => {
    const state = new FeedState();
    state.apply(first);
    expect(state.apply({ ...first, frame: 9, is_whole: false })).toBe(false);
    expect(new FeedState().apply({ ...first, frame: 9 })).toBe(true);
  });
});

describe("the map", () => {
  it.each([[10, 1200], [1500, 1200], [100_000, 1200], [100_000, 360], [131_072, 800]])("places %i cells on %i pixels", (count, width) => {
    const place = layout(count, width);
    expect(place.columns * place.lines).toBeGreaterThanOrEqual(count);
    expect(place.columns * place.size).toBeLessThanOrEqual(width);
  });
});

describe("words", () => {
  const row = (kind: string, place: string): Row => [-1, 1, kind, "a", "", "", 0, 0, 0, 0, 0, 0, "", place];

  it.each([["asleep", "host", "in host memory"], ["asleep", "disk", "on disk"], ["asleep", "nowhere", "dropped"], ["swapped", "", "in host memory"], ["decode", "", "decode"]])("say where %s %s is", (kind, place, said) => {
    expect(what(row(kind, place))).toContain(said);
  });

  it("tell the first token from a later one", () => {
    const drawn = { at: 1, step: 1, kind: "drawn", sequence: 0, row: 0, value: 0 };
    expect(meaning(drawn, true)).not.toBe(meaning(drawn, false));
  });

  it("have units", () => {
    expect([duration(0.0123), duration(2.5), duration(33)]).toEqual(["12.3 ms", "2500 ms", "33.00 s"]);
  });
});

describe("images", () => {
  it.each([[100, 50, 100, 50], [4096, 1024, 2048, 512], [3, 9000, 1, 2048], [0, 0, 1, 1]])("of %i × %i are sent as %i × %i", (width, height, wide, high) => {
    expect(fit(width, height)).toEqual([wide, high]);
  });
});

describe("conversations", () => {
  const message = (id: string, parent: string, role: Message["role"]): Message => ({ id, parent, role, content: id });
  const all = [message("u1", "", "user"), message("a1", "u1", "assistant"), message("u2", "a1", "user"), message("u2b", "a1", "user"), message("a2b", "u2b", "assistant")];
  const conversation: Conversation = { id: "c", title: "", changed: 0, leaf: "a2b", messages: Object.fromEntries(all.map((one) => [one.id, one])) };
  it("have branches", () => {
    expect(branch(conversation).map((one) => one.id)).toEqual(["u1", "a1", "u2b", "a2b"]);
    expect(siblings(conversation, conversation.messages.u2!).map((one) => one.id)).toEqual(["u2", "u2b"]);
    expect(tipBelow(conversation, "u2")).toBe("u2");
    expect(tipBelow(conversation, "u1")).toBe("a2b");
  });
});

describe("a timeline", () => {
  it("has a span for each state", () => {
    const event = (kind: string, at: number) => ({ kind, at, step: 0, sequence: 0, row: 0, value: 0 });
    const timeline: Timeline = { id: "r", tenant: "", prompt_tokens: 1, arrival: 0, now: 9, finish_reason: "", is_whole: true, steps: [], events: [event("waiting", 1), event("admitted", 2), event("drawn", 3), event("preempted", 4), event("admitted", 6), event("finished", 9)] };
    expect(spans(timeline, 0, 10)).toEqual([["waiting", 1, 2], ["admitted", 2, 4], ["preempted", 4, 6], ["admitted", 6, 9]]);
  });
});
