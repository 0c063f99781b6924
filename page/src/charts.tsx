// Small charts on canvases: lines over time, the last steps, the rows.
import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { hsl, hueOf, isDarkNow } from "./blockmap";
import type { Row, Step } from "./feed";

export interface Line {
  name: string;
  colour: string;
  values: number[];
}

interface CanvasProps {
  id?: string;
  label: string;
  height: number;
  draw: (context: CanvasRenderingContext2D, width: number, height: number) => void;
}

/** A canvas that is drawn again whenever it is rendered. */
function Canvas({ id, label, height, draw }: CanvasProps): VNode {
  const ref = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const canvas = ref.current!;
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = canvas.clientWidth;
    if (!width) return;
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
    }
    const context = canvas.getContext("2d")!;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  });
  return <canvas ref={ref} id={id} role="img" aria-label={label} class="chart" style={{ height: `${height}px` }} />;
}

export function ink(): string {
  return isDarkNow() ? "#9aa6ab" : "#5c676c";
}

function short(value: number): string {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(value ? 2 : 0);
}

/** `top`: the value at the upper edge; the largest one if it is not given. */
export function LineChart({ title, unit, lines, top: given, format = short }: { title: string; unit: string; lines: Line[]; top?: number; format?: (value: number) => string }): VNode {
  const top = given ?? Math.max(1e-9, ...lines.flatMap((line) => line.values));
  const now = lines.map((line) => `${line.name} ${format(line.values.at(-1) ?? 0)}`).join(", ");
  return (
    <figure class="panel">
      <figcaption>
        <span>{title}</span>
        <span class="keys">
          {lines.map((line) => (
            <span key={line.name}>
              <i style={{ background: line.colour }} />
              {line.name} <b>{format(line.values.at(-1) ?? 0)}</b>
            </span>
          ))}
          <span>{unit}</span>
        </span>
      </figcaption>
      <Canvas
        label={`${title}: ${now} ${unit}`}
        height={90}
        draw={(context, width, height) => {
          context.fillStyle = ink();
          context.font = "11px system-ui, sans-serif";
          context.strokeStyle = isDarkNow() ? "#2c3438" : "#e4e1d8";
          context.beginPath();
          context.moveTo(0, height - 0.5);
          context.lineTo(width, height - 0.5);
          context.stroke();
          for (const line of lines) {
            context.strokeStyle = line.colour;
            context.lineWidth = 1.5;
            context.lineJoin = "round";
            context.beginPath();
            const count = Math.max(60, line.values.length);
            line.values.forEach((value, index) => {
              const x = width - ((line.values.length - 1 - index) * width) / (count - 1);
              const y = height - 2 - (value / top) * (height - 18);
              if (index) context.lineTo(x, y);
              else context.moveTo(x, y);
            });
            context.stroke();
          }
          context.fillText(format(top), 2, 11);
        }}
      />
    </figure>
  );
}

export const KINDS = { decodes: "#3d8b8b", prompts: "#d18f2c", drafts: "#9a6fb0" };

/** The last steps as bars: tokens by kind. */
export function StepChart({ steps }: { steps: Step[] }): VNode {
  const shown = steps.slice(-120);
  const top = Math.max(1, ...shown.map((step) => step[3] + step[5] + step[6]));
  const last = shown.at(-1);
  const said = last ? `${last[3]} + ${last[5]} + ${last[6]} in step ${last[0]}` : "no steps yet";
  return (
    <figure class="panel">
      <figcaption>
        <span>Last steps, tokens by kind</span>
        <span class="keys">
          {Object.entries(KINDS).map(([name, colour]) => <span key={name}><i style={{ background: colour }} />{name}</span>)}
        </span>
      </figcaption>
      <Canvas
        id="steps"
        label={`Tokens of the last ${shown.length} steps; ${said}`}
        height={90}
        draw={(context, width, height) => {
          const bar = width / 120;
          shown.forEach((step, index) => {
            const x = width - (shown.length - index) * bar;
            let y = height;
            const parts: [number, string][] = [[step[3], KINDS.decodes], [step[6], KINDS.drafts], [step[5], KINDS.prompts]];
            for (const [tokens, colour] of parts) {
              const high = (tokens / top) * (height - 14);
              context.fillStyle = colour;
              context.fillRect(x, y - high, Math.max(1, bar - 1), high);
              y -= high;
            }
          });
          context.fillStyle = ink();
          context.font = "11px system-ui, sans-serif";
          context.fillText(String(top), 2, 11);
        }}
      />
    </figure>
  );
}

/** Every row of the batch as a bar: how far it is, in its owner's colour. */
export function RowStrip({ rows, count }: { rows: Row[]; count: number }): VNode {
  const running = rows.filter((row) => row[0] >= 0);
  const lanes = Math.max(1, Math.min(count, 2048));
  const columns = lanes <= 64 ? Math.min(lanes, 16) : Math.ceil(Math.sqrt(lanes * 4));
  const lines = Math.ceil(lanes / columns);
  const high = lines <= 4 ? 18 : Math.max(4, Math.floor(160 / lines));
  return (
    <Canvas
      id="rows"
      label={`${running.length} of ${count} rows are in use`}
      height={lines * (high + 2)}
      draw={(context, width) => {
        const wide = width / columns;
        context.fillStyle = isDarkNow() ? "#20262a" : "#edeae2";
        for (let lane = 0; lane < lanes; lane += 1) {
          context.fillRect((lane % columns) * wide, Math.floor(lane / columns) * (high + 2), wide - 2, high);
        }
        for (const row of running) {
          const x = (row[0] % columns) * wide;
          const y = Math.floor(row[0] / columns) * (high + 2);
          const [red, green, blue] = hsl(hueOf(row[1]), 0.48, isDarkNow() ? 0.54 : 0.56);
          context.fillStyle = `rgba(${red}, ${green}, ${blue}, 0.35)`;
          context.fillRect(x, y, wide - 2, high);
          context.fillStyle = `rgb(${red}, ${green}, ${blue})`;
          context.fillRect(x, y, Math.max(1, (wide - 2) * Math.min(1, row[6] / Math.max(1, row[9]))), high);
        }
      }}
    />
  );
}

/** A line for each layer, a cell for each expert: 32 is a fair share. */
export function ExpertHeat({ layers, experts, loads }: { layers: string[]; experts: number; loads: Uint8Array }): VNode {
  const high = Math.max(3, Math.min(14, Math.floor(280 / Math.max(1, layers.length))));
  return (
    <Canvas
      id="experts"
      label={`Load of ${experts} experts in each of ${layers.length} layers`}
      height={layers.length * high}
      draw={(context, width) => {
        const wide = width / Math.max(1, experts);
        const isDark = isDarkNow();
        for (let layer = 0; layer < layers.length; layer += 1) {
          for (let expert = 0; expert < experts; expert += 1) {
            const load = Math.min(1, loads[layer * experts + expert]! / 96); // three times the share is the strongest colour
            const [red, green, blue] = hsl(182, 0.35, isDark ? 0.16 + 0.56 * load : 0.93 - 0.6 * load);
            context.fillStyle = `rgb(${red}, ${green}, ${blue})`;
            context.fillRect(expert * wide, layer * high, Math.max(0.5, wide - (wide > 4 ? 1 : 0)), high - (high > 4 ? 1 : 0));
          }
        }
      }}
    />
  );
}
