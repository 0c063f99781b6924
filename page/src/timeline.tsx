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
  now: number;
  finish_reason: string;
  events: TimelineEvent[];
  steps: TimelineStep[];
  is_whole: boolean;
}

/** A time after the start. */
export function duration(seconds: number): string {
  return seconds >= 10 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(seconds >= 1 ? 0 : 1)} ms`;
}

function composition(step: TimelineStep): string {
  const parts = [
    step.decodes ? `${step.decodes} decode${step.decodes > 1 ? "s" : ""}` : "",
    step.prompts ? `${step.prompts} prompt${step.prompts > 1 ? "s" : ""} (${step.prompt_tokens} tokens)` : "",
    step.drafts ? `${step.drafts} draft${step.drafts > 1 ? "s" : ""}` : "",
  ];
  return parts.filter(Boolean).join(", ") || "nothing";
}

function did(step: TimelineStep): string {
  if (step.is_prompt) return `a chunk of ${step.computed} tokens`;
  const drafts = step.computed > 1 ? ` and verified ${step.computed - 1} draft${step.computed > 2 ? "s" : ""}` : "";
  return `a decode that drew ${step.drew === 1 ? "a token" : `${step.drew} tokens`}${drafts}`;
}

const MOST_STEPS = 500;

const COLOURS: Record<string, string> = {
  waiting: "#c2573f", compiling: "#9a6fb0", loading: "#6b7fb3", admitted: "#3d8b8b", preempted: "#c2573f", restarted: "#c2573f",
};

/** `isFirst`: of its kind, in its sequence. */
export function meaning(event: TimelineEvent, isFirst = true): string {
  switch (event.kind) {
    case "waiting": return `waits for a row, with ${event.value} tokens`;
    case "compiling": return "its grammar is compiled";
    case "loading": return "its blocks are loaded from a lower tier";
    case "admitted": return `gets row ${event.row}; ${event.value} of its tokens were cached`;
    case "drawn": return isFirst ? "its prompt is computed: the first token" : "its tokens are there again: the next token";
    case "swapped": return `its ${event.value} tokens move to host memory`;
    case "preempted": return "loses its row and blocks: blocks ran out";
    case "restarted": return "starts again from its known tokens";
    case "awaits mask": return "waits for its grammar's mask";
    case "finished": return `ends after ${event.value} generated tokens`;
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
  const end = Math.max(start + 1e-3, timeline.finish_reason ? 0 : timeline.now, ...timeline.events.map((one) => one.at), timeline.steps.at(-1)?.end ?? 0);
  const sequences = [...new Set(timeline.events.map((event) => event.sequence))].sort((a, b) => a - b);
  const isMany = sequences.length > 1;
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
        if (one === step) {
          context.strokeStyle = isDarkNow() ? "#ffffff" : "#111111";
          context.lineWidth = 1.5;
          context.strokeRect(x(one.start) - 1, y + 17, Math.max(3, x(one.end) - x(one.start) + 1), 34);
        }
      }
    });
    context.fillStyle = ink();
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = isDarkNow() ? "#2c3438" : "#e4e1d8";
    const labels = width < 500 ? 3 : 5;
    for (let i = 0; i <= labels; i += 1) {
      const label = duration((end - start) * (i / labels));
      context.textAlign = i === 0 ? "left" : i === labels ? "right" : "center";
      context.fillText(label, (width * i) / labels, height - 6);
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
        <h2>{timeline.id}<small>{timeline.prompt_tokens} prompt tokens; {timeline.steps.length} steps; {timeline.finish_reason ? `ended: ${timeline.finish_reason}` : "running"}</small></h2>
        <canvas
          ref={canvas}
          id="timeline"
          class="chart"
          role="img"
          aria-label={`Timeline of ${timeline.id}: ${timeline.events.length} events, ${timeline.steps.length} steps, ${tokens} decoded tokens, ${(1000 * (end - start)).toFixed(0)} ms`}
          style={{ height: `${height}px` }}
          onMouseMove={point}
          onMouseLeave={() => setStep(null)}
          tabIndex={0}
          onKeyDown={(event) => {
            const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
            if (event.key === "Escape") setStep(null);
            if (by === undefined || !timeline.steps.length) return;
            event.preventDefault();
            const at = step ? timeline.steps.indexOf(step) + by : 0;
            setStep(timeline.steps[Math.max(0, Math.min(timeline.steps.length - 1, at))]!);
          }}
        />
        <p class="tip" aria-live="polite" id="step">
          {step
            ? `Step ${step.step}, ${duration(step.end - step.start)}: ${did(step)}, in row ${step.row}. The whole step computed ${composition(step)}.`
            : "Above: the request's states. Below: the steps it was in; a taller bar is a fuller step. Point at one, or use the arrow keys, to see what it computed."}
        </p>
        <ul class="legend">
          <li><i style={{ background: COLOURS.waiting }} />waiting</li>
          <li><i style={{ background: COLOURS.admitted }} />running</li>
          {timeline.events.some((event) => event.kind === "loading") && <li><i style={{ background: COLOURS.loading }} />loading</li>}
          <li><i style={{ background: KINDS.prompts }} />chunk</li>
          <li><i style={{ background: KINDS.decodes }} />decode</li>
        </ul>
        {!timeline.is_whole && <p class="note">Its first steps are no longer kept.</p>}
      </section>
      <section class="panel" aria-label="Events">
        <h2>Events</h2>
        <div class="scroll" tabIndex={0} role="region" aria-label="Events">
          <table id="events">
            <thead><tr><th>after</th><th>event</th>{isMany && <th>sequence</th>}<th>step</th><th>what it means</th></tr></thead>
            <tbody>
              {timeline.events.map((event, index) => (
                <tr key={index}><td>{duration(event.at - start)}</td><td>{event.kind}</td>{isMany && <td>{event.sequence}</td>}<td>{event.step}</td><td>{meaning(event, timeline.events.findIndex((one) => one.kind === event.kind && one.sequence === event.sequence) === index)}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
        <details class="steps">
          <summary>Every step: {timeline.steps.length}</summary>
          <div class="scroll" tabIndex={0} role="region" aria-label="Steps">
            <table id="request-steps">
              <thead><tr><th>after</th><th>step</th><th>took</th>{isMany && <th>sequence</th>}<th>this request</th><th>the whole step</th></tr></thead>
              <tbody>
                {timeline.steps.slice(0, MOST_STEPS).map((one) => (
                  <tr key={`${one.step}-${one.sequence}`}>
                    <td>{duration(one.start - start)}</td><td>{one.step}</td><td>{duration(one.end - one.start)}</td>{isMany && <td>{one.sequence}</td>}<td>{did(one)}</td><td>{composition(one)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          {timeline.steps.length > MOST_STEPS && <p class="note">The first {MOST_STEPS} are listed. The Perfetto trace has all.</p>}
        </details>
      </section>
    </>
  );
}
