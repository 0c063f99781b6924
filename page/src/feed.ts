// The feed of what the engine does: frames with differences become a state, which views read.
import { events, keys, ServerError } from "./api";

export const STATES = ["empty", "cached", "held", "shared", "moving", "other"] as const;
export type BlockState = (typeof STATES)[number];

export type Row = [
  row: number, colour: number, kind: string, name: string, tenant: string, session: string, computed: number,
  known: number, prompt: number, limit: number, blocks: number, shared: number, adapter: string, place: string,
];
export type Adapters = [slots: number, loaded: string[], held: string[], awaited: string[]];
export type Step = [number: number, at: number, ms: number, decodes: number, prompts: number, promptTokens: number, drafts: number];

export interface Waiting {
  name: string;
  tenant: string;
  tokens: number;
  preemptions: number;
  seconds: number;
  reason: string;
  detail: string;
}

export interface Slow {
  status: string;
  restarts?: number;
  ranks?: { tensor: number; pipeline: number; experts: number } | null;
  replicas?: { status: string; running: number; waiting: number; blocks_used: number; generated_tokens: number }[];
  speculation?: Record<string, number>;
  acceptance?: number[];
  experts?: Record<string, number>;
  expert_map?: { layers: string[]; experts: number; loads: string } | null;
  rank_skew?: number;
  energy?: { joules?: number; prompt?: number; decode?: number; idle?: number; watts?: number; budget?: number; is_estimated?: number; held_seconds?: number };
  adapters?: Record<string, number>;
  sessions?: Record<string, number>;
}

export interface Tiers {
  pressure: { device: number; host: number; disk: number };
  transfers: { out: number; back: number; writes: number };
  host?: { slots: number; used: number; owned: number; block_bytes: number } | null;
  disk?: { blocks: number; owned: number; block_bytes: number; disk_bytes: number; capacity: number; is_paused: boolean } | null;
}

export interface CellChange {
  size: number;
  stride: number;
  full?: string;
  runs?: number[];
  data?: string;
}

export type Counts = Partial<Record<BlockState, number>>;

export interface Frame {
  frame: number;
  is_whole?: boolean;
  scope: "admin" | "tenant";
  at: number;
  status?: string;
  replica?: number;
  block_size?: number;
  row_count?: number;
  budget?: number;
  counters?: Record<string, number>;
  waiting?: number;
  loading?: number;
  compiling?: number;
  steps?: Step[];
  rows?: Row[];
  hidden?: number;
  queue?: Waiting[];
  cells?: CellChange;
  counts?: Counts;
  host_cells?: CellChange | null;
  host_counts?: Counts;
  adapters?: Adapters | null;
  tenants?: { name: string; rows: number; waiting: number; blocks: number; tokens: number }[];
  latency?: { first_median: number; first_p95: number; token_median: number; token_p95: number };
  tiers?: Tiers;
  slow?: Slow;
  cost_ms?: number;
}

export interface Sample {
  at: number;
  out: number;
  prompt: number;
  running: number;
  waiting: number;
  hits: number;
  /** Milliseconds: the median of recent requests, and what 95% of them are below. */
  first: number;
  firstSlow: number;
  token: number;
  tokenSlow: number;
  watts: number;
}

const KEPT_SAMPLES = 600;
const KEPT_STEPS = 160;

export function decode(text: string): Uint8Array {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** The cells of one tier. */
export class CellMap {
  cells: Uint8Array = new Uint8Array(0);
  stride = 1;
  version = 0;

  /** False: the change does not fit to what is known. */
  apply(change: CellChange): boolean {
    this.stride = change.stride;
    this.version += 1;
    if (change.full !== undefined) this.cells = decode(change.full);
    else if (this.cells.length !== change.size) return false;
    else if (change.runs && change.data) {
      const data = decode(change.data);
      let at = 0;
      for (let i = 0; i + 1 < change.runs.length; i += 2) {
        const length = change.runs[i + 1]!;
        this.cells.set(data.subarray(at, at + length), change.runs[i]!);
        at += length;
      }
    }
    return true;
  }
}

export class FeedState {
  device = new CellMap();
  host = new CellMap();
  version = 0;
  frame: Frame | undefined;
  slow: Slow | undefined;
  steps: Step[] = [];
  samples: Sample[] = [];
  latest: Sample = { at: 0, out: 0, prompt: 0, running: 0, waiting: 0, hits: 0, first: 0, firstSlow: 0, token: 0, tokenSlow: 0, watts: 0 };

  /** Take a frame; false: frames were missed, and the feed must start again. */
  apply(frame: Frame): boolean {
    const before = this.frame;
    if (before && !frame.is_whole && frame.frame !== before.frame + 1) return false;
    if (frame.slow) this.slow = frame.slow;
    this.frame = frame;
    this.version += 1;
    if (frame.status) return true;
    if (frame.cells && !this.device.apply(frame.cells)) return false;
    if (frame.host_cells && !this.host.apply(frame.host_cells)) return false;
    this.steps = [...this.steps, ...(frame.steps ?? [])].slice(-KEPT_STEPS);
    this.sample(before, frame);
    return true;
  }

  private sample(before: Frame | undefined, now: Frame): void {
    const old = before?.counters;
    const fresh = now.counters;
    const seconds = (now.at - (before?.at ?? now.at)) / 1000;
    if (!old || !fresh || seconds <= 0) return;
    const grown = (name: string) => Math.max(0, (fresh[name] ?? 0) - (old[name] ?? 0));
    const queried = grown("queried_tokens");
    this.latest = {
      at: now.at,
      out: grown("generated_tokens") / seconds,
      prompt: grown("prompt_tokens") / seconds,
      running: fresh.running ?? 0,
      waiting: now.waiting ?? 0,
      hits: queried ? grown("cached_tokens") / queried : this.latest.hits,
      first: now.latency?.first_median ?? 0,
      firstSlow: now.latency?.first_p95 ?? 0,
      token: now.latency?.token_median ?? 0,
      tokenSlow: now.latency?.token_p95 ?? 0,
      watts: this.slow?.energy?.watts ?? 0,
    };
    this.samples = [...this.samples, this.latest].slice(-KEPT_SAMPLES);
  }

  /** Tokens a second over the last seconds: single frames jump. */
  mean(name: "out" | "prompt", seconds = 2): number {
    const recent = this.samples.filter((one) => one.at > this.latest.at - 1000 * seconds);
    return recent.length ? recent.reduce((sum, one) => sum + one[name], 0) / recent.length : 0;
  }
}

export interface FeedOptions {
  hz: number;
  replica: number;
}

export type FeedStatus = { kind: "connecting" | "live" | "paused" } | { kind: "failed"; message: string; status: number };

/** Follows the feed while someone looks at it, and connects again when it ends. */
export class Feed {
  state = new FeedState();
  status: FeedStatus = { kind: "connecting" };
  options: FeedOptions = { hz: 4, replica: 0 };
  private listeners = new Set<() => void>();
  private running: AbortController | undefined;

  /** A page that nobody sees asks for nothing. */
  constructor() {
    const look = (isSeen: boolean) => {
      if (!isSeen) this.stop();
      else if (this.listeners.size && !this.running) this.restart();
    };
    document.addEventListener("visibilitychange", () => look(!document.hidden));
    addEventListener("pagehide", () => look(false));
    addEventListener("pageshow", () => look(true));
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    if (!this.running) this.start();
    return () => {
      this.listeners.delete(listener);
      if (!this.listeners.size) this.stop();
    };
  }

  restart(options: Partial<FeedOptions> = {}): void {
    this.options = { ...this.options, ...options };
    this.stop();
    this.state = new FeedState();
    if (this.listeners.size) this.start();
  }

  private stop(): void {
    this.running?.abort();
    this.running = undefined;
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }

  private start(): void {
    const control = new AbortController();
    this.running = control;
    void this.follow(control);
  }

  private async follow(control: AbortController): Promise<void> {
    for (let pause = 500; !control.signal.aborted; pause = Math.min(8000, 2 * pause)) {
      try {
        const where = keys.admin ? "admin/feed" : "v1/engine/feed";
        const query = `?hz=${this.options.hz}&replica=${this.options.replica}`;
        this.status = { kind: "connecting" };
        for await (const data of events(where + query, { isAdmin: Boolean(keys.admin), signal: control.signal })) {
          if (control.signal.aborted) return;
          if (!this.state.apply(JSON.parse(data) as Frame)) {
            this.state = new FeedState();
            break;
          }
          this.status = { kind: "live" };
          pause = 250;
          this.tell();
        }
      } catch (error) {
        if (control.signal.aborted) return;
        const status = error instanceof ServerError ? error.status : 0;
        this.status = { kind: "failed", message: error instanceof Error ? error.message : String(error), status };
        this.tell();
        if ([401, 403, 404].includes(status)) {
          if (this.running === control) this.running = undefined;
          return;
        }
      }
      if (this.status.kind === "live") {
        this.status = { kind: "connecting" }; // the stream has ended
        this.tell();
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
}

export const feed = new Feed();
