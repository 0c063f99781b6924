import { useEffect, useRef, useState } from "preact/hooks";
import type { VNode } from "preact";
import { type ModelCard, newId } from "./api";
import { Composer } from "./composer";
import { useFeed } from "./hooks";
import { generate } from "./generate";
import { filesOf } from "./images";
import { Markdown, visible } from "./markdown";
import {
  type Conversation, type Message, type Parameters, DEFAULTS, branch, conversations, readSetting, siblings, tipBelow,
  writeSetting,
} from "./store";

const SUGGESTIONS = ["What is a KV cache, in two sentences?", "Write a haiku about pages of a book.", "List three uses of a lighthouse."];

/** The page was left while replies were written: they are as far as they were saved. */
function ended(conversation: Conversation): Conversation {
  for (const one of Object.values(conversation.messages)) {
    if (one.role === "assistant" && !one.stats && !one.error) one.stopped = true;
  }
  return conversation;
}

function blank(): Conversation {
  return { id: newId("c-"), title: "", changed: Date.now(), messages: {}, leaf: "" };
}

interface ChatProps {
  models: ModelCard[];
  /** It stays, unseen, while another view is shown: its replies go on. */
  isShown: boolean;
  onTimeline: (id: string) => void;
}

export function Chat({ models, isShown, onTimeline }: ChatProps): VNode {
  const [saved, setSaved] = useState<Conversation[]>([]);
  const [open, setOpen] = useState<Conversation>(blank);
  const [given, setGiven] = useState<Parameters>(() => ({ ...DEFAULTS, ...readSetting("parameters", {}) }));
  const [model, setModel] = useState(() => readSetting("model", ""));
  const [busy, setBusy] = useState<AbortController | null>(null);
  const [isDropping, setDropping] = useState(false);
  const [editing, setEditing] = useState("");
  const [isListOpen, setListOpen] = useState(false);
  const [, redraw] = useState(0);
  const [announced, setAnnounced] = useState("");
  const end = useRef<HTMLDivElement>(null);
  const sticks = useRef(true);
  const adder = useRef<(files: File[]) => void>(() => undefined);
  const card = models.find((one) => one.id === model) ?? models[0];

  useEffect(() => {
    const known = readSetting("open", "");
    conversations
      .all()
      .then((found) => {
        setSaved(found);
        const last = found.find((one) => one.id === known);
        if (last) setOpen(ended(last));
      })
      .catch(() => undefined);
  }, []);
  useEffect(() => writeSetting("parameters", given), [given]);
  useEffect(() => writeSetting("open", open.id), [open.id]);

  const scroll = () => {
    if (sticks.current) end.current?.scrollIntoView({ block: "end" });
  };
  useEffect(() => {
    sticks.current = true;
    scroll();
  }, [open.id, isShown]);
  const keep = (one: Conversation) => {
    one.changed = Date.now();
    conversations
      .put(one)
      .then(() => conversations.all())
      .then(setSaved)
      .catch(() => undefined);
  };

  async function answer(parent: string): Promise<void> {
    if (!card) return;
    const reply: Message = { id: newId("m-"), parent, role: "assistant", content: "" };
    open.messages[reply.id] = reply;
    open.leaf = reply.id;
    const control = new AbortController();
    setBusy(control);
    sticks.current = true;
    let planned = false;
    const soon = () => {
      if (planned) return;
      planned = true;
      requestAnimationFrame(() => {
        planned = false;
        redraw((n) => n + 1);
        scroll();
      });
    };
    soon();
    keep(open);
    try {
      await generate(open, reply, card, given, control.signal, soon);
    } catch (error) {
      if (control.signal.aborted) reply.stopped = true;
      else reply.error = error instanceof Error ? error.message : String(error);
    }
    setAnnounced(reply.error ? `Error: ${reply.error}` : reply.stopped ? "Stopped." : `Reply: ${reply.content.slice(0, 500)}`);
    setBusy(null);
    soon();
    keep(open);
  }

  function send(text: string, parent = open.leaf, pictures: string[] = []): void {
    if ((!text.trim() && !pictures.length) || busy || !card) return;
    const message: Message = { id: newId("m-"), parent, role: "user", content: text };
    if (pictures.length) message.images = pictures;
    open.messages[message.id] = message;
    open.title ||= text.trim().slice(0, 60) || "Image";
    setEditing("");
    void answer(message.id);
  }

  function show(id: string): void {
    open.leaf = tipBelow(open, id);
    keep(open);
    redraw((n) => n + 1);
  }

  const path = branch(open);
  const begin = (one: Conversation) => {
    busy?.abort();
    setOpen(one);
    setEditing("");
    setListOpen(false);
  };
  return (
    <div
      class={isDropping ? "chat dropping" : "chat"}
      hidden={!isShown}
      onDragOver={(event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault(); // otherwise the browser leaves the page and opens the file
        setDropping(true);
      }}
      onDragLeave={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget as Node | null)) setDropping(false);
      }}
      onDrop={(event) => {
        const files = filesOf(event.dataTransfer);
        setDropping(false);
        if (!files.length) return;
        event.preventDefault();
        adder.current(files);
      }}
    >
      <aside class={isListOpen ? "list open" : "list"} aria-label="Conversations">
        <button type="button" class="primary wide" onClick={() => begin(blank())}>
          New chat
        </button>
        <ul>
          {saved.map((one) => (
            <li key={one.id} class={one.id === open.id ? "current" : ""}>
              <button type="button" class="quiet title" aria-current={one.id === open.id ? "true" : undefined} onClick={() => begin(one.id === open.id ? open : ended(one))}>
                {visible(one.title) || "Untitled"}
              </button>
              <button
                type="button"
                class="quiet"
                aria-label={`Delete ${visible(one.title) || "conversation"}`}
                onClick={() => {
                  void conversations.remove(one.id).then(() => conversations.all()).then(setSaved);
                  if (one.id === open.id) begin(blank());
                }}
              >
                ×
              </button>
            </li>
          ))}
        </ul>
        <ParameterForm given={given} onChange={setGiven} />
      </aside>
      <section class="thread" aria-label="Conversation">
        <div class="bar">
          <button type="button" class="quiet onlyPhone" aria-expanded={isListOpen} onClick={() => setListOpen(!isListOpen)}>
            ☰ Chats
          </button>
          <label class="model">
            <span class="sr">Model</span>
            <select
              value={card?.id}
              onChange={(event) => {
                setModel(event.currentTarget.value);
                writeSetting("model", event.currentTarget.value);
              }}
            >
              {models.map((one) => <option key={one.id} value={one.id}>{one.id}</option>)}
            </select>
          </label>
          <SharedNote conversation={open} isOn={isShown && given.usesSessions} />
        </div>
        <div
          class="messages"
          tabIndex={0}
          role="log"
          aria-label="Messages"
          onScroll={(event) => {
            const box = event.currentTarget;
            sticks.current = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
          }}
        >
          {path.length === 0 && (
            <div class="hello">
              <h2>Say something</h2>
              <p>
                {card ? `${card.id} answers. ` : ""}While it does, the <a href="#engine">Engine</a> view shows the pages of memory it writes.
              </p>
              <div class="suggestions">
                {SUGGESTIONS.map((one) => (
                  <button type="button" key={one} disabled={!card} onClick={() => send(one)}>
                    {one}
                  </button>
                ))}
              </div>
            </div>
          )}
          {path.map((message) => (
            <Bubble
              key={message.id}
              message={message}
              others={siblings(open, message)}
              isBusy={busy !== null}
              isLive={busy !== null && message.id === open.leaf}
              isEditing={editing === message.id}
              onEdit={() => setEditing(editing === message.id ? "" : message.id)}
              onSend={(text) => send(text, message.parent, message.images ?? [])}
              onAgain={() => void answer(message.parent)}
              onShow={show}
              onTimeline={onTimeline}
            />
          ))}
          <div ref={end} />
        </div>
        <div class="sr" aria-live="polite">{announced}</div>
        <Composer card={card} isBusy={busy !== null} adder={adder} onSend={(text, images) => send(text, open.leaf, images)} onStop={() => busy?.abort()} />
      </section>
    </div>
  );
}

interface BubbleProps {
  message: Message;
  others: Message[];
  isBusy: boolean;
  isLive: boolean;
  isEditing: boolean;
  onEdit: () => void;
  onSend: (text: string) => void;
  onAgain: () => void;
  onShow: (id: string) => void;
  onTimeline: (id: string) => void;
}

function Bubble(props: BubbleProps): VNode {
  const { message, others, isBusy, isLive } = props;
  const [text, setText] = useState(message.content);
  const place = others.findIndex((one) => one.id === message.id);
  const isUser = message.role === "user";
  return (
    <article class={`bubble ${message.role}`} aria-label={isUser ? "You" : "Reply"}>
      {message.thinking && (
        <details class="fold">
          <summary>Thinking ({message.thinking.length.toLocaleString()} characters)</summary>
          <Markdown text={message.thinking} />
        </details>
      )}
      {message.calls?.map((call, index) => (
        <details class="fold" key={index}>
          <summary>Tool call: {visible(call.name)}</summary>
          <pre tabIndex={0}><code>{visible(call.arguments)}</code></pre>
        </details>
      ))}
      {props.isEditing ? (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            props.onSend(text);
          }}
        >
          <textarea aria-label="Edit message" rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} />
          <div class="actions">
            <button type="button" class="quiet" onClick={props.onEdit}>Cancel</button>
            <button type="submit" class="primary">Send as a branch</button>
          </div>
        </form>
      ) : isUser ? (
        message.content && <div class="markdown plain">{visible(message.content)}</div>
      ) : (
        <Markdown text={message.content} />
      )}
      {message.images && (
        <div class="pictures">
          {message.images.map((url, index) => <img key={index} src={url} alt={`Image ${index + 1} of the message`} />)}
        </div>
      )}
      {isLive && !message.content && !message.thinking && <span class="cursor" role="status">Waiting for the first token…</span>}
      {message.error && <p class="error" role="alert">{visible(message.error)}</p>}
      {message.stopped && <p class="note">Stopped.</p>}
      {message.isCut && <p class="note">Cut here: “Most tokens” of the parameters, or the model's context, is used up.</p>}
      <footer>
        {others.length > 1 && (
          <span class="branches">
            <button type="button" class="quiet" aria-label="Previous branch" disabled={place <= 0 || isBusy} onClick={() => props.onShow(others[place - 1]!.id)}>‹</button>
            <span>{place + 1} of {others.length}</span>
            <button type="button" class="quiet" aria-label="Next branch" disabled={place >= others.length - 1 || isBusy} onClick={() => props.onShow(others[place + 1]!.id)}>›</button>
          </span>
        )}
        {isUser && !props.isEditing && (
          <button type="button" class="quiet" disabled={isBusy} onClick={props.onEdit}>Edit</button>
        )}
        {!isUser && !isLive && (
          <button type="button" class="quiet" disabled={isBusy} onClick={props.onAgain}>Regenerate</button>
        )}
        {!isUser && !isLive && message.content && (
          <button type="button" class="quiet" onClick={() => void navigator.clipboard?.writeText(message.content)}>Copy</button>
        )}
        {message.request && !isLive && (
          <button type="button" class="quiet" onClick={() => props.onTimeline(message.request!)}>Timeline</button>
        )}
        {message.stats && <StatsLine message={message} />}
      </footer>
    </article>
  );
}

function StatsLine({ message }: { message: Message }): VNode {
  const stats = message.stats!;
  const parts = [
    `${stats.tokens.toLocaleString()} tokens`,
    stats.tokensPerSecond ? `${stats.tokensPerSecond.toFixed(1)} tokens/s` : "",
    `first after ${stats.firstMs < 1000 ? `${stats.firstMs.toFixed(0)} ms` : `${(stats.firstMs / 1000).toFixed(2)} s`}`,
    stats.promptTokens ? `${stats.cachedTokens} of ${stats.promptTokens} prompt tokens cached` : "",
    message.session ? `session ${message.session.id}` : "",
  ];
  return <span class="stats">{parts.filter(Boolean).join(" · ")}</span>;
}

/** What the branches of this conversation share on the device. */
function SharedNote({ conversation, isOn }: { conversation: Conversation; isOn: boolean }): VNode | null {
  const own = new Set(Object.values(conversation.messages).flatMap((one) => (one.session ? [one.session.id] : [])));
  const state = useFeed(isOn && own.size > 0);
  if (!isOn || !own.size || !state) return null;
  const held = (state.frame?.rows ?? []).filter((row) => own.has(row[5]));
  const shared = Math.max(0, ...held.map((row) => row[11]));
  const blocks = held.reduce((sum, row) => sum + row[10], 0);
  return (
    <span class="note" id="shared">
      {own.size} session{own.size > 1 ? "s" : ""}, {blocks} blocks{shared ? `, ${shared} shared between branches` : ""}
    </span>
  );
}

function ParameterForm({ given, onChange }: { given: Parameters; onChange: (given: Parameters) => void }): VNode {
  const number = (name: "temperature" | "topP" | "maxTokens", label: string, min: number, max: number, step: number) => (
    <label>
      {label}
      <input
        type="number"
        min={min}
        max={max}
        step={step}
        value={given[name]}
        onInput={(event) => {
          const value = event.currentTarget.valueAsNumber;
          if (Number.isFinite(value)) onChange({ ...given, [name]: value });
        }}
      />
    </label>
  );
  return (
    <details class="parameters">
      <summary>Parameters</summary>
      <label>
        System prompt
        <textarea rows={3} value={given.system} onInput={(event) => onChange({ ...given, system: event.currentTarget.value })} />
      </label>
      {number("temperature", "Temperature", 0, 2, 0.1)}
      {number("topP", "Top p", 0.01, 1, 0.05)}
      {number("maxTokens", "Most tokens", 1, 1_000_000, 1)}
      <label>
        More fields of the request, as JSON
        <textarea rows={2} spellcheck={false} placeholder='{"top_k": 40}' value={given.extra} onInput={(event) => onChange({ ...given, extra: event.currentTarget.value })} />
      </label>
      <label class="check">
        <input type="checkbox" checked={given.usesSessions} onChange={(event) => onChange({ ...given, usesSessions: event.currentTarget.checked })} />
        Keep on the server as a session: branches are forks that share blocks
      </label>
    </details>
  );
}
