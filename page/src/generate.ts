// One reply of the model: as a chat completion, or as the turn of a session on the server.
import { type ModelCard, ServerError, events, getJson, newId } from "./api";
import { type Conversation, type Message, type Parameters, branch } from "./store";

interface Chunk {
  choices?: { index?: number; delta?: Delta; finish_reason?: string | null }[];
  usage?: Usage | null;
  error?: { message: string };
}

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

interface Delta {
  content?: string | null;
  reasoning?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index?: number; function?: { name?: string; arguments?: string } }[];
}

interface SessionObject {
  id: string;
  num_tokens: number;
}

function plain(message: Message): unknown {
  if (!message.images?.length) return { role: message.role, content: message.content };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  const text = message.content.trim() ? [{ type: "text", text: message.content }] : [];
  return { role: message.role, content: [...images, ...text] };
}

function bodyOf(model: ModelCard, given: Parameters): Record<string, unknown> {
  let extra: Record<string, unknown> = {};
  if (given.extra.trim()) {
    try {
      extra = JSON.parse(given.extra) as Record<string, unknown>;
    } catch (error) {
      throw new Error(`More fields (in Parameters) are not JSON: ${String(error)}`, { cause: error });
    }
  }
  return {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: given.temperature,
    top_p: given.topP,
    max_tokens: Math.max(1, Math.min(given.maxTokens, Math.floor(model.max_model_len / 2))),
    ...extra,
  };
}

/** The session to continue, forked where another branch went on, and the messages it does not have yet. */
async function sessionFor(path: Message[], given: Parameters): Promise<{ id: string; input: unknown[]; forked: boolean }> {
  for (let at = path.length - 1; at >= 0; at -= 1) {
    const known = path[at]!.session;
    if (!known) continue;
    const input = path.slice(at + 1).map(plain);
    const found = await getJson<SessionObject>(`v1/sessions/${known.id}`).catch((error: unknown) => {
      if (error instanceof ServerError && error.status === 404) return null; // it has expired
      throw error;
    });
    if (!found) continue;
    if (found.num_tokens === known.tokens) return { id: known.id, input, forked: false };
    const fork = { id: newId("page-"), at: known.tokens };
    await getJson(`v1/sessions/${known.id}/fork`, { body: fork });
    return { id: fork.id, input, forked: true };
  }
  const system = given.system.trim() ? [{ role: "system", content: given.system }] : [];
  const made = await getJson<SessionObject>("v1/sessions", { body: { id: newId("page-"), ttl: 86400 } });
  return { id: made.id, input: [...system, ...path.map(plain)], forked: false };
}

/** Fills in `reply` as text comes; `onText` is called after each change. */
export async function generate(
  conversation: Conversation,
  reply: Message,
  model: ModelCard,
  given: Parameters,
  signal: AbortSignal,
  onText: () => void,
): Promise<void> {
  const path = branch(conversation, reply.parent);
  const begin = performance.now();
  let first = 0;
  let firstTokens = 0;
  reply.request = newId("page-");
  const headers = { "X-Request-Id": reply.request };
  let where = "v1/chat/completions";
  let body: Record<string, unknown>;
  let session = "";
  if (given.usesSessions) {
    const turn = await sessionFor(path, given);
    session = turn.id;
    where = `v1/sessions/${turn.id}/generate`;
    body = { ...bodyOf(model, given), input: turn.input };
  } else {
    const system = given.system.trim() ? [{ role: "system", content: given.system }] : [];
    body = { ...bodyOf(model, given), messages: [...system, ...path.map(plain)] };
  }
  const note = (usage: Usage) => {
    const now = performance.now();
    if (!first) [first, firstTokens] = [now, usage.completion_tokens];
    const seconds = (now - first) / 1000;
    reply.stats = {
      firstMs: first - begin,
      tokensPerSecond: seconds > 0.05 ? (usage.completion_tokens - firstTokens) / seconds : 0,
      tokens: usage.completion_tokens,
      promptTokens: usage.prompt_tokens,
      cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    };
  };
  for await (const data of events(where, { body, signal, headers })) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.find((one) => !one.index);
    if (choice?.delta) take(reply, choice.delta);
    if (choice?.finish_reason === "length") reply.isCut = true;
    if (chunk.usage?.completion_tokens) note(chunk.usage);
    onText();
  }
  if (session) {
    const found = await getJson<SessionObject>(`v1/sessions/${session}`);
    reply.session = { id: session, tokens: found.num_tokens };
  }
}

function take(reply: Message, delta: Delta): void {
  const thinking = delta.reasoning ?? delta.reasoning_content;
  if (thinking) reply.thinking = (reply.thinking ?? "") + thinking;
  if (delta.content) reply.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    reply.calls ??= [];
    const known = (reply.calls[call.index ?? reply.calls.length] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
}
