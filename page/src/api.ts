// The server, at addresses relative to the page: it may be behind a proxy, under any path.

export interface Settings {
  version: string;
  needs_key: boolean;
  has_admin: boolean;
}

export interface ModelCard {
  id: string;
  max_model_len: number;
  root?: string;
  [more: string]: unknown;
}

export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** Keys live as long as the tab: never in a cookie, so that no other site can make a browser send them. */
export const keys = {
  get user(): string {
    return sessionStorage.getItem("quire.key") ?? "";
  },
  set user(value: string) {
    sessionStorage.setItem("quire.key", value);
  },
  get admin(): string {
    return sessionStorage.getItem("quire.admin") ?? "";
  },
  set admin(value: string) {
    sessionStorage.setItem("quire.admin", value);
  },
};

function headersOf(isAdmin: boolean, more: Record<string, string> = {}): Record<string, string> {
  const key = isAdmin ? keys.admin : keys.user;
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function failure(response: Response): Promise<ServerError> {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body?.error?.message ?? message;
  } catch {
    // Not JSON: the status says enough.
  }
  return new ServerError(String(message), response.status);
}

export interface Call {
  method?: string;
  body?: unknown;
  isAdmin?: boolean;
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

async function call(path: string, options: Call = {}): Promise<Response> {
  const more = { ...options.headers };
  if (options.body !== undefined) more["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: options.method ?? (options.body === undefined ? "GET" : "POST"),
    headers: headersOf(options.isAdmin ?? false, more),
    body: options.body === undefined ? undefined : JSON.stringify(options.body),
    signal: options.signal,
    credentials: "omit",
    redirect: "error",
  });
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson<T>(path: string, options: Call = {}): Promise<T> {
  return (await (await call(path, options)).json()) as T;
}

export async function getBlob(path: string, options: Call = {}): Promise<Blob> {
  return (await call(path, options)).blob();
}

/** The data of each server-sent event. EventSource cannot send keys. */
export async function* events(path: string, options: Call = {}): AsyncGenerator<string> {
  const response = await call(path, options);
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

/** Whether a model takes images: servers say it in different fields. */
export function seesImages(card: ModelCard | undefined): boolean {
  if (!card) return false;
  const places: unknown[] = [card.input_modalities, card.modalities, card.capabilities, card.architecture];
  const text = JSON.stringify(places.filter((place) => place !== undefined)).toLowerCase();
  return /"(image|images|vision)"(?!\s*:\s*(false|null|0))/.test(text);
}

export function newId(prefix: string): string {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
