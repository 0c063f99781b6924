import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { getBlob, getJson, keys } from "./api";
import { isDarkNow } from "./blockmap";
import { KINDS, ink } from "./charts";
import { useFeed } from "./hooks";

export interface TimelineEvent {
  at: number;
  step: number;
  kind: string;
  sequence: number;
  row: number;
  value: number;
}

export interface TimelineStep {
  step: number;
  start: number;
  end: number;
  sequence: number;
  row: number;
  is_prompt: boolean;
  computed: number;
  drew: number;
  decodes: number;
  prompts: number;
  prompt_tokens: number;
  drafts: number;
}

export interface Timeline {
  id: string;
  tenant: string;
  prompt_tokens: number;
  arrival: number;
  finish_reason: string;
  events: TimelineEvent[];
  steps: TimelineStep[];
  is_whole: boolean;
}

const COLOURS: Record<string, string> = {
  waiting: "#c2573f", compiling: "#9a6fb0", loading: "#6b7fb3", admitted: "#3d8b8b", preempted: "#c2573f", restarted: "#c2573f",
};

export function meaning(event: TimelineEvent): string {
  switch (event.kind) {
    case "waiting": return `waits for a row, with ${event.value} tokens`;
    case "compiling": return "its grammar is compiled";
    case "loading": return "its blocks are loaded from a lower tier";
    case "admitted": return `gets row ${event.row}; ${event.value} of its tokens were cached`;
    case "drawn": return "its prompt is computed: the first token";
    case "swapped": return `its ${event.value} tokens move to host memory`;
    case "preempted": return "loses its row and blocks: blocks ran out";
    case "restarted": return "starts again from its known tokens";
    case "awaits mask": return "waits for its grammar's mask";
    case "finished": return `ends after ${event.value} tokens`;
    default: return "";
  }
}

/** The time each state lasted, of one sequence: [kind, start, end]. */
export function spans(timeline: Timeline, sequence: number, end: number): [string, number, number][] {
  const own = timeline.events.filter((event) => event.sequence === sequence && event.kind !== "drawn" && event.kind !== "swapped");
  return own.flatMap((event, index): [string, number, number][] =>
    event.kind === "finished" ? [] : [[event.kind, event.at, own[index + 1]?.at ?? end]],
  );
}

export function TimelineView({ id, onOpen }: { id: string; onOpen: (id: string) => void }): VNode {
  const [text, setText] = useState(id);
  const [found, setFound] = useState<Timeline | null>(null);
  const [error, setError] = useState("");
  const state = useFeed();
  const base = keys.admin ? "admin" : "v1/engine";
  const isAdmin = Boolean(keys.admin);
  useEffect(() => {
    setText(id);
    setFound(null);
    setError("");
    if (!id) return undefined;
    let timer: ReturnType<typeof setTimeout>;
    const control = new AbortController();
    const load = () => {
      getJson<Timeline>(`${base}/requests/${encodeURIComponent(id)}/timeline`, { isAdmin, signal: control.signal }).then(
        (one) => {
          setFound(one);
          if (!one.finish_reason) timer = setTimeout(load, 1000);
        },
        (problem: Error) => {
          if (!control.signal.aborted) setError(problem.message);
        },
      );
    };
    load();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [id, base, isAdmin]);

  async function download(): Promise<void> {
    const blob = await getBlob(`${base}/requests/${encodeURIComponent(id)}/timeline?format=perfetto`, { isAdmin });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = "request.perfetto.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  const names = [...new Set([...(state?.frame?.rows ?? []).filter((row) => row[2] !== "session").map((row) => row[3]), ...(state?.frame?.queue ?? []).map((one) => one.name)])];
  return (
    <div class="timeline">
      <form
        class="bar"
        onSubmit={(event) => {
          event.preventDefault();
          onOpen(text.trim());
        }}
      >
        <label class="grow">
          Request
          <input id="request" value={text} list="known" placeholder="id of a recent request, as X-Request-Id or chatcmpl-…" onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <datalist id="known">{names.slice(0, 50).map((one) => <option key={one} value={one} />)}</datalist>
        <button type="submit" class="primary">Show</button>
        {found && <button type="button" id="perfetto" onClick={() => void download()}>Perfetto trace</button>}
      </form>
      {error && <p class="error" role="alert">{error}</p>}
      {!id && (
        <div class="notice">
          <h2>What happened to a request?</h2>
          <p>Choose one: a reply's <i>Timeline</i> button in the chat, a request in the Engine view, or an id above.</p>
          <ul class="plainList">{names.slice(0, 12).map((one) => <li key={one}><button type="button" class="link" onClick={() => onOpen(one)}>{one}</button></li>)}</ul>
        </div>
      )}
      {found && <Shown timeline={found} />}
    </div>
  );
}

function Shown({ timeline }: { timeline: Timeline }): VNode {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [step, setStep] = useState<TimelineStep | null>(null);
  const start = timeline.arrival || timeline.events[0]?.at || 0;
  const end = Math.max(start + 1e-3, ...timeline.events.map((one) => one.at), timeline.steps.at(-1)?.end ?? 0);
  const sequences = [...new Set(timeline.events.map((event) => event.sequence))].sort((a, b) => a - b);
  const lane = 58;
  const height = sequences.length * lane + 22;
  useEffect(() => {
    const box = canvas.current!;
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = box.clientWidth;
    box.width = width * scale;
    box.height = height * scale;
    const context = box.getContext("2d")!;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const x = (at: number) => ((at - start) / (end - start)) * width;
    sequences.forEach((sequence, place) => {
      const y = place * lane;
      for (const [kind, from, to] of spans(timeline, sequence, end)) {
        context.fillStyle = COLOURS[kind] ?? "#888888";
        context.globalAlpha = 0.85;
        context.fillRect(x(from), y, Math.max(1, x(to) - x(from)), 14);
        context.globalAlpha = 1;
      }
      for (const one of timeline.steps) {
        if (one.sequence !== sequence) continue;
        const share = Math.min(1, (one.decodes + one.prompt_tokens) / 64);
        context.fillStyle = one.is_prompt ? KINDS.prompts : KINDS.decodes;
        const high = 10 + 22 * share;
        context.fillRect(x(one.start), y + 50 - high, Math.max(1, x(one.end) - x(one.start) - 0.5), high);
      }
    });
    context.fillStyle = ink();
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = isDarkNow() ? "#2c3438" : "#e4e1d8";
    for (let i = 0; i <= 5; i += 1) {
      const label = `${(1000 * (end - start) * (i / 5)).toFixed(0)} ms`;
      context.textAlign = i === 0 ? "left" : i === 5 ? "right" : "center";
      context.fillText(label, (width * i) / 5, height - 6);
    }
  });
  const point = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const at = start + ((event.clientX - box.left) / box.width) * (end - start);
    const sequence = sequences[Math.floor((event.clientY - box.top) / lane)] ?? 0;
    setStep(timeline.steps.find((one) => one.sequence === sequence && one.start <= at && at <= one.end) ?? null);
  };
  const tokens = timeline.steps.reduce((sum, one) => sum + one.drew, 0);
  return (
    <>
      <section class="panel" aria-label="Timeline">
        <h2>{timeline.id}<small>{timeline.prompt_tokens} prompt tokens; {timeline.steps.length} steps; {timeline.finish_reason || "running"}</small></h2>
        <canvas
          ref={canvas}
          id="timeline"
          class="chart"
          role="img"
          aria-label={`Timeline of ${timeline.id}: ${timeline.events.length} events, ${timeline.steps.length} steps, ${tokens} decoded tokens, ${(1000 * (end - start)).toFixed(0)} ms`}
          style={{ height: `${height}px` }}
          onMouseMove={point}
          onMouseLeave={() => setStep(null)}
        />
        <p class="tip">
          {step
            ? `Step ${step.step}, ${(1000 * (step.end - step.start)).toFixed(1)} ms: ${step.is_prompt ? `a chunk of ${step.computed} tokens` : `a decode that drew ${step.drew}`} in row ${step.row}, together with ${step.decodes} decodes, ${step.prompts} prompts (${step.prompt_tokens} tokens) and ${step.drafts} drafts`
            : "Above: the request's states. Below: the steps it was in; a taller bar is a fuller step. Point at one to see what it computed."}
        </p>
        <ul class="legend">
          <li><i style={{ background: COLOURS.waiting }} />waiting</li>
          <li><i style={{ background: COLOURS.admitted }} />running</li>
          <li><i style={{ background: COLOURS.loading }} />loading</li>
          <li><i style={{ background: KINDS.prompts }} />chunk</li>
          <li><i style={{ background: KINDS.decodes }} />decode</li>
        </ul>
        {!timeline.is_whole && <p class="note">Its first steps are no longer kept.</p>}
      </section>
      <section class="panel" aria-label="Events">
        <h2>Events</h2>
        <div class="scroll" tabIndex={0} role="region" aria-label="Events">
          <table id="events">
            <thead><tr><th>after</th><th>event</th><th>sequence</th><th>step</th><th>what it means</th></tr></thead>
            <tbody>
              {timeline.events.map((event, index) => (
                <tr key={index}><td>{(1000 * (event.at - start)).toFixed(1)} ms</td><td>{event.kind}</td><td>{event.sequence}</td><td>{event.step}</td><td>{meaning(event)}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
    </>
  );
}
