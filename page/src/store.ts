// Conversations in this browser (IndexedDB), and small preferences (localStorage).

export interface Stats {
  firstMs: number;
  tokensPerSecond: number;
  tokens: number;
  promptTokens: number;
  cachedTokens: number;
}

export interface ToolCall {
  name: string;
  arguments: string;
}

export interface Message {
  id: string;
  parent: string;
  role: "user" | "assistant";
  content: string;
  thinking?: string;
  calls?: ToolCall[];
  images?: string[];
  error?: string;
  stopped?: boolean;
  /** It ended at its limit of tokens. */
  isCut?: boolean;
  request?: string;
  stats?: Stats;
  /** Where the turn ends in a session on the server. */
  session?: { id: string; tokens: number };
}

export interface Conversation {
  id: string;
  title: string;
  changed: number;
  messages: Record<string, Message>;
  /** The last message of the branch that is shown. */
  leaf: string;
}

export interface Parameters {
  system: string;
  temperature: number;
  topP: number;
  maxTokens: number;
  usesSessions: boolean;
  /** More fields of the request, as JSON. */
  extra: string;
}

export const DEFAULTS: Parameters = { system: "", temperature: 0.7, topP: 1, maxTokens: 1024, usesSessions: false, extra: "" };

let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("quire", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the browser keeps no data for this page"));
  });
  return opened;
}

async function within<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const db = await database();
  return new Promise((resolve, reject) => {
    const request = work(db.transaction("conversations", mode).objectStore("conversations"));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the browser refused to keep the conversation"));
  });
}

export const conversations = {
  all: async (): Promise<Conversation[]> => {
    const found = (await within("readonly", (store) => store.getAll())) as Conversation[];
    return found.sort((a, b) => b.changed - a.changed);
  },
  put: (one: Conversation) => within("readwrite", (store) => store.put(one)),
  remove: (id: string) => within("readwrite", (store) => store.delete(id)),
};

export function readSetting<T>(name: string, fallback: T): T {
  try {
    const text = localStorage.getItem(`quire.${name}`);
    return text === null ? fallback : (JSON.parse(text) as T);
  } catch {
    return fallback;
  }
}

export function writeSetting(name: string, value: unknown): void {
  try {
    localStorage.setItem(`quire.${name}`, JSON.stringify(value));
  } catch {
    // Private windows may refuse: the setting lasts as long as the page.
  }
}

/** The messages from the first to `leaf`. */
export function branch(conversation: Conversation, leaf = conversation.leaf): Message[] {
  const path: Message[] = [];
  for (let at = conversation.messages[leaf]; at; at = conversation.messages[at.parent]) path.unshift(at);
  return path;
}

/** Messages with the same parent, in the order they were made. */
export function siblings(conversation: Conversation, message: Message): Message[] {
  return Object.values(conversation.messages).filter((one) => one.parent === message.parent && one.role === message.role);
}

/** The last message below one, along the newest branches. */
export function tipBelow(conversation: Conversation, id: string): string {
  for (;;) {
    const below = Object.values(conversation.messages).filter((one) => one.parent === id);
    const last = below.at(-1);
    if (!last) return id;
    id = last.id;
  }
}
