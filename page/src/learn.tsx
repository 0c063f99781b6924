import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type ModelCard, getJson, newId } from "./api";
import { BlockMap } from "./blockmap";
import { RowStrip } from "./charts";
import { type FeedState, type Row, feed } from "./feed";
import { useFeed } from "./hooks";

interface Lesson {
  title: string;
  text: string[];
  action: string;
  run: (send: Send, state: FeedState) => Promise<unknown>;
  /** What to say about the tour's own requests now. */
  watch: (own: Row[], state: FeedState) => string;
  end: string;
}

type Send = (prompt: string, tokens: number, tag: string) => Promise<unknown>;

const STORY = "A quire is a gathering of pages. A long story is written on many of them, one after the other, and every page has room for the same number of words. ";

function blocks(own: Row[]): number {
  return own.reduce((sum, row) => sum + row[10], 0);
}

const LESSONS: Lesson[] = [
  {
    title: "Pages, not one long shelf",
    text: [
      "For every token it has read, a model keeps keys and values: its memory of the conversation. quire cuts the memory of the device into blocks, like pages of a book. Each cell below is one.",
      "A request gets a block when it needs one, wherever one is free. Its block table says which block is its first, second, third page. Nothing is reserved for tokens that may never come.",
    ],
    action: "Send one request",
    run: (send) => send(STORY.repeat(2), 120, "pages"),
    watch: (own, state) => (own[0] ? `It has ${own[0][7]} tokens in ${own[0][10]} blocks of ${state.frame?.block_size} tokens: a new block appears every ${state.frame?.block_size} tokens.` : ""),
    end: "It has ended. Its full blocks stay as cached: they are free to be used again, but a request with the same beginning can still find them.",
  },
  {
    title: "Continuous batching",
    text: [
      "The device is fastest when it computes many requests at once. A step takes one token of every running request; requests join and leave between any two steps, each in a row of its own.",
      "No request waits for the longest one of a batch: a row that is free is given away at once.",
    ],
    action: "Send six requests of different lengths",
    run: (send) => Promise.all([20, 60, 100, 140, 180, 220].map((tokens, index) => send(`Story number ${index}: `, tokens, "batch"))),
    watch: (own) => (own.length ? `${own.length} of the six have a row; together they hold ${blocks(own)} blocks. Short ones leave first.` : ""),
    end: "All six have ended, the short ones first, without waiting for the others.",
  },
  {
    title: "Shared beginnings",
    text: [
      "Requests often begin with the same text: a system prompt, a document, the conversation so far. Equal beginnings have equal keys and values, so they are computed once and shared.",
      "A shared block has a dot. It is counted by its owners, and copied only when one of them would write into it.",
    ],
    action: "Send four requests with the same beginning",
    run: async (send) => {
      const same = STORY.repeat(3);
      const first = send(`${same}The end, first version:`, 160, "share");
      await new Promise((resolve) => setTimeout(resolve, 700));
      await Promise.all([first, ...[2, 3, 4].map((number) => send(`${same}The end, version ${number}:`, 120, "share"))]);
    },
    watch: (own) => {
      const shared = Math.max(0, ...own.map((row) => row[11]));
      if (!own.length) return "";
      return shared ? `${own.length} requests share ${shared} blocks each: without sharing they would need ${shared * (own.length - 1)} more.` : `${own.length} request runs; the others come in a moment.`;
    },
    end: "The shared blocks were computed once. Prefix hits in the Engine view count what was found.",
  },
  {
    title: "Why requests wait",
    text: [
      "There are only so many rows, and only so many blocks. Requests that do not fit wait, in the order of the scheduling policy, and quire can say what each of them waits for.",
    ],
    action: "Send more requests than there are rows",
    run: (send, state) => {
      const count = Math.min(80, (state.frame?.row_count ?? 16) + 6);
      return Promise.all(Array.from({ length: count }, (_, index) => send(`Line ${index} of a long poem: `, 60, "wait")));
    },
    watch: (own, state) => {
      const queue = state.frame?.queue ?? [];
      return queue[0] ? `${own.length} run, ${state.frame?.waiting} wait. The first one waits because ${queue[0].detail}.` : own.length ? `${own.length} run; none waits now.` : "";
    },
    end: "All of them were served. The Engine view lists waiting requests with their reasons; the Timeline view shows how long each waited.",
  },
];

export function Learn({ models }: { models: ModelCard[] }): VNode {
  const state = useFeed()!;
  const [place, setPlace] = useState(0);
  const [phase, setPhase] = useState<"ready" | "running" | "done">("ready");
  const [said, setSaid] = useState("");
  const [error, setError] = useState("");
  const tag = useRef("");
  const control = useRef<AbortController | null>(null);
  useEffect(() => () => control.current?.abort(), []);
  const lesson = LESSONS[place]!;
  const model = models[0];
  const own = (state.frame?.rows ?? []).filter((row) => tag.current && row[3].startsWith(tag.current));
  const now = phase === "running" ? lesson.watch(own, state) : "";
  useEffect(() => {
    if (now) setSaid(now);
  }, [now]);

  async function run(): Promise<void> {
    if (!model) return;
    setPhase("running");
    setSaid("");
    setError("");
    tag.current = newId("learn-");
    control.current = new AbortController();
    const { signal } = control.current;
    const fits = Math.max(16, Math.floor(model.max_model_len / 2));
    let number = 0;
    const send: Send = (prompt, tokens) =>
      getJson("v1/completions", {
        body: { model: model.id, prompt: prompt.slice(0, fits), max_tokens: Math.min(tokens, fits - 8), ignore_eos: true, temperature: 0.8 },
        headers: { "X-Request-Id": `${tag.current}.${number++}` },
        signal,
      });
    try {
      await lesson.run(send, state);
      setPhase("done");
    } catch (problem) {
      setError(problem instanceof Error ? problem.message : String(problem));
      setPhase("ready");
    }
  }

  function go(next: number): void {
    control.current?.abort();
    setPlace(next);
    setPhase("ready");
    setSaid("");
  }

  return (
    <div class="learn">
      <section class="panel lesson" aria-label="Lesson">
        <p class="progress">{place + 1} of {LESSONS.length}</p>
        <h2>{lesson.title}</h2>
        {lesson.text.map((one) => <p key={one}>{one}</p>)}
        <div class="actions">
          <button type="button" class="primary" id="try" disabled={phase === "running" || !model} onClick={() => void run()}>
            {phase === "done" ? "Again" : lesson.action}
          </button>
          <button type="button" disabled={place === 0} onClick={() => go(place - 1)}>Back</button>
          <button type="button" id="next" disabled={place === LESSONS.length - 1} onClick={() => go(place + 1)}>Next</button>
        </div>
        <p class="said" id="said" aria-live="polite">{said}</p>
        {phase === "done" && <p class="said done" id="lesson-end">{lesson.end}</p>}
        {error && <p class="error" role="alert">{error}</p>}
      </section>
      <section class="panel" aria-label="The engine now">
        <h2>This engine, now<small>{state.frame?.counters?.running ?? 0} of {state.frame?.row_count ?? 0} rows, {state.frame?.waiting ?? 0} waiting</small></h2>
        {state.frame && !state.frame.status ? (
          <>
            <BlockMap state={state} />
            <RowStrip rows={state.frame.rows ?? []} count={state.frame.row_count ?? 0} />
          </>
        ) : (
          <p class="note">{feed.status.kind === "failed" ? feed.status.message : "Connecting…"}</p>
        )}
      </section>
    </div>
  );
}
