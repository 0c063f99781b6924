// The map of blocks: one pixel a cell in a small image, scaled up, so that 100,000 cells cost one draw.
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { getJson, keys } from "./api";
import { type CellMap, type FeedState, STATES, feed } from "./feed";

export interface Layout {
  size: number;
  columns: number;
  lines: number;
}

const LARGEST_CELL = 18;
const TALLEST = 300;
/** Cells at least this large have a gap between them. */
const GAPPED = 6;

/** The largest square cells with which `count` fit into the width, and into a height that fits the screen. */
export function layout(count: number, width: number): Layout {
  for (let size = LARGEST_CELL; size > 1; size -= 1) {
    const columns = Math.max(1, Math.floor(width / size));
    const lines = Math.ceil(count / columns);
    if (lines * size <= TALLEST) return { size, columns, lines };
  }
  const columns = Math.max(1, Math.floor(width / 2));
  return { size: 2, columns, lines: Math.ceil(count / columns) };
}

type Colour = [number, number, number];

export function hsl(hue: number, saturation: number, lightness: number): Colour {
  const a = saturation * Math.min(lightness, 1 - lightness);
  const part = (n: number) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (lightness - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

export function hueOf(colour: number): number {
  return (colour * 137.5) % 360;
}

/** The colour of each of the 256 values of a cell. */
export function palette(isDark: boolean): Uint32Array {
  const table = new Uint32Array(256);
  const plain: Colour[] = isDark
    ? [[38, 44, 48], [74, 86, 92], [120, 130, 136], [120, 130, 136], [224, 176, 74], [92, 84, 100]]
    : [[233, 231, 224], [193, 199, 200], [120, 130, 136], [120, 130, 136], [214, 150, 40], [178, 170, 186]];
  for (let value = 0; value < 256; value += 1) {
    const state = value & 7;
    const colour = value >> 3;
    let shown = plain[state] ?? plain[0]!;
    if (colour && (state === 2 || state === 3)) {
      const lightness = isDark ? (state === 3 ? 0.74 : 0.54) : state === 3 ? 0.34 : 0.56;
      shown = hsl(hueOf(colour), state === 3 ? 0.6 : 0.48, lightness);
    }
    table[value] = (255 << 24) | (shown[2] << 16) | (shown[1] << 8) | shown[0];
  }
  return table;
}

export function isDarkNow(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

class MapDrawing {
  private image: ImageData | undefined;
  private pixels = new OffscreenCanvas(1, 1);
  private colours = palette(false);
  private isDark: boolean | undefined;
  private drawn = -1;
  place: Layout = { size: 1, columns: 1, lines: 1 };

  draw(canvas: HTMLCanvasElement, map: CellMap, selected: number): void {
    const width = canvas.clientWidth;
    const count = map.cells.length;
    if (!width || !count) return;
    const dark = isDarkNow();
    const place = layout(count, width);
    if (dark !== this.isDark || place.columns !== this.place.columns || place.lines !== this.place.lines || !this.image) {
      this.isDark = dark;
      this.colours = palette(dark);
      this.place = place;
      this.pixels = new OffscreenCanvas(place.columns, place.lines);
      this.image = new ImageData(place.columns, place.lines);
      this.drawn = -1;
    }
    const scale = Math.min(2, devicePixelRatio || 1);
    const wide = place.columns * place.size * scale;
    const high = place.lines * place.size * scale;
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
      canvas.style.height = `${place.lines * place.size}px`;
      canvas.style.maxWidth = `${place.columns * place.size}px`;
    }
    if (this.drawn !== map.version) {
      const words = new Uint32Array(this.image.data.buffer);
      const { cells } = map;
      for (let i = 0; i < count; i += 1) words[i] = this.colours[cells[i]!]!;
      words.fill(0, count);
      this.pixels.getContext("2d")!.putImageData(this.image, 0, 0);
      this.drawn = map.version;
    }
    const context = canvas.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, wide, high);
    context.drawImage(this.pixels, 0, 0, wide, high);
    const cell = place.size * scale;
    if (place.size >= GAPPED) {
      context.globalCompositeOperation = "destination-out";
      for (let x = 1; x <= place.columns; x += 1) context.fillRect(x * cell - scale, 0, scale, high);
      for (let y = 1; y <= place.lines; y += 1) context.fillRect(0, y * cell - scale, wide, scale);
      context.globalCompositeOperation = "source-over";
      context.fillStyle = dark ? "#14181a" : "#ffffff";
      for (let i = 0; i < count; i += 1) {
        if ((map.cells[i]! & 7) !== 3) continue; // a shared block has a dot
        const x = (i % place.columns) * cell + (cell - scale) / 2;
        const y = Math.floor(i / place.columns) * cell + (cell - scale) / 2;
        const dot = Math.max(2, cell / 4);
        context.fillRect(x - dot / 2, y - dot / 2, dot, dot);
      }
    }
    if (selected >= 0 && selected < count) {
      context.strokeStyle = dark ? "#ffffff" : "#111111";
      context.lineWidth = 2 * scale;
      context.strokeRect((selected % place.columns) * cell - scale / 2, Math.floor(selected / place.columns) * cell - scale / 2, cell, cell);
    }
  }
}

interface BlockAnswer {
  block: number;
  references: number;
  is_cached: boolean;
  users: { name: string; kind: string; row: number; first_token: number; num_tokens: number; text: string }[];
}

export type Tier = "device" | "host";
const NAMES: Record<Tier, string> = { device: "Block", host: "Host block" };

function describe(map: CellMap, tier: Tier, selected: number): string {
  const value = map.cells[selected] ?? 0;
  return `${NAMES[tier]} ${selected * map.stride + 1}: ${STATES[value & 7] ?? "empty"}`;
}

/** A cell for each block of a tier. */
export function BlockMap({ state, tier = "device" }: { state: FeedState; tier?: Tier }): VNode {
  const map = state[tier];
  const canvas = useRef<HTMLCanvasElement>(null);
  const drawing = useRef<MapDrawing | null>(null);
  const [selected, setSelected] = useState(-1);
  const [detail, setDetail] = useState<BlockAnswer | null>(null);
  const chosen = useRef(-1);
  chosen.current = selected;

  useEffect(() => {
    drawing.current ??= new MapDrawing();
    let last = -1;
    let next = 0;
    const tick = () => {
      const box = canvas.current;
      const stamp = feed.state[tier].version + 1e6 * (chosen.current + 2) + (isDarkNow() ? 0.5 : 0) + (box?.clientWidth ?? 0) * 1e-5;
      if (box && stamp !== last) {
        drawing.current!.draw(box, feed.state[tier], chosen.current);
        last = stamp;
      }
      next = requestAnimationFrame(tick);
    };
    next = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(next);
  }, [tier]);

  const value = map.cells[selected];
  useEffect(() => setDetail(null), [selected]);
  useEffect(() => {
    if (selected < 0) return undefined;
    const control = new AbortController();
    const timer = setTimeout(() => {
      const where = `${keys.admin ? "admin" : "v1/engine"}/blocks/${selected * feed.state[tier].stride + 1}?replica=${feed.options.replica}&tier=${tier}`;
      getJson<BlockAnswer>(where, { isAdmin: Boolean(keys.admin), signal: control.signal }).then(setDetail, () => undefined);
    }, 120);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [selected, value, tier]); // asked again when the block changes

  const at = (event: MouseEvent): number => {
    const place = drawing.current?.place;
    const box = canvas.current?.getBoundingClientRect();
    if (!place || !box) return -1;
    const scale = box.width / (place.columns * place.size) || 1;
    const x = Math.floor((event.clientX - box.left) / (place.size * scale));
    const y = Math.floor((event.clientY - box.top) / (place.size * scale));
    const found = y * place.columns + x;
    return x >= 0 && x < place.columns && found >= 0 && found < map.cells.length ? found : -1;
  };
  const onKey = (event: KeyboardEvent) => {
    const columns = drawing.current?.place.columns ?? 1;
    const by: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const step = by[event.key];
    if (event.key === "Escape") setSelected(-1);
    if (step === undefined) return;
    event.preventDefault();
    setSelected(Math.max(0, Math.min(map.cells.length - 1, Math.max(selected, 0) + (selected < 0 ? 0 : step))));
  };
  const counts = (tier === "device" ? state.frame?.counts : state.frame?.host_counts) ?? {};
  const summary = STATES.filter((one) => counts[one]).map((one) => `${counts[one]} ${one}`).join(", ");
  return (
    <div class="map">
      <canvas
        ref={canvas}
        id={tier === "device" ? "blocks" : "host-blocks"}
        tabIndex={0}
        role="img"
        aria-label={`Map of ${map.cells.length} blocks${tier === "host" ? " in host memory" : ""}: ${summary}. Arrow keys choose one.`}
        onMouseMove={(event) => setSelected(at(event))}
        onMouseLeave={() => setSelected(-1)}
        onKeyDown={onKey}
      />
      <p class="tip" aria-live="polite" id={tier === "device" ? "tip" : "host-tip"}>
        {selected < 0 ? `Point at a ${tier === "host" ? "slot" : "block"}, or use the arrow keys, to see what it holds.` : <BlockText title={describe(map, tier, selected)} detail={detail} />}
      </p>
      <ul class="legend">
        {STATES.filter((one) => one !== "other" || counts.other).filter((one) => one !== "moving" || counts.moving).map((one) => (
          <li key={one}><span class={`swatch ${one}`} />{one} <b>{(counts[one] ?? 0).toLocaleString()}</b></li>
        ))}
        {map.stride > 1 && <li>one cell in {map.stride} is shown</li>}
      </ul>
    </div>
  );
}

function BlockText({ title, detail }: { title: string; detail: BlockAnswer | null }): VNode {
  if (!detail) return <span>{title}</span>;
  const users = detail.users.map((user) => {
    const where = user.first_token < 0 ? "" : `, tokens ${user.first_token}–${user.first_token + Math.max(0, user.num_tokens - 1)}`;
    return `${user.kind} ${user.name}${user.row >= 0 ? ` (row ${user.row})` : ""}${where}`;
  });
  const text = detail.users.find((user) => user.text)?.text;
  const isUnused = detail.is_cached && !detail.references;
  return (
    <span>
      <b>{title}</b>
      {detail.references > 1 ? `, used ${detail.references} times` : ""}
      {users.length ? `: ${users.slice(0, 4).join("; ")}${users.length > 4 ? ` and ${users.length - 4} more` : ""}` : ""}
      {isUnused && !users.length ? ": nothing uses it now; a request with the same beginning finds it" : ""}
      {text ? <q class="tokens">{text}</q> : null}
    </span>
  );
}
