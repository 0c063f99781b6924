// Markdown to elements. Text only ever becomes text nodes; nothing here can make markup from what a model wrote.
import type { ComponentChild, VNode } from "preact";

const LONGEST_INLINE = 20_000;
/** Deepest nesting of quotes and lists. */
const DEEPEST = 6;

/** An address that a link may have; null: the link is shown as text. */
export function safeHref(given: string): string | null {
  const text = given.trim();
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** Control characters, and those that change the direction of what follows, made visible. */
export function visible(text: string): string {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (one) => {
    const code = one.charCodeAt(0);
    return code === 13 ? "" : code < 32 ? String.fromCharCode(0x2400 + code) : "\ufffd";
  });
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|!?\[([^\][]{0,1000})\]\(([^()\s]{0,2000})\)|(\*\*|__)(?=\S)([\s\S]{1,2000}?\S)\5|([*_])(?=\S)([^*_]{0,2000}?\S)\7(?!\w)|~~(?=\S)([^~]{1,2000})~~|(https?:\/\/[^\s<>()"']{1,2000})/g;

export function inline(text: string): ComponentChild[] {
  if (text.length > LONGEST_INLINE) return [text];
  const out: ComponentChild[] = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, label, href, , strong, mark, soft, gone, bare] = match;
    const before = text[match.index - 1] ?? " ";
    if (mark === "_" && /\w/.test(before)) continue; // snake_case
    if (match.index < at) continue;
    if (match.index > at) out.push(text.slice(at, match.index));
    at = match.index + whole.length;
    if (code !== undefined) out.push(<code>{code}</code>);
    else if (label !== undefined) out.push(link(label, href ?? ""));
    else if (strong !== undefined) out.push(<strong>{inline(strong)}</strong>);
    else if (soft !== undefined) out.push(<em>{inline(soft)}</em>);
    else if (gone !== undefined) out.push(<del>{inline(gone)}</del>);
    else if (bare !== undefined) out.push(link(bare, bare));
  }
  if (at < text.length) out.push(text.slice(at));
  return out;
}

function link(label: string, given: string): ComponentChild {
  const href = safeHref(given);
  if (href === null) return `[${label}](${given})`;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow">
      {label || href}
    </a>
  );
}

function isTableRule(line: string | undefined): boolean {
  return line !== undefined && line.includes("-") && /^\s*\|?[\s:|-]+\|?\s*$/.test(line) && line.includes("|");
}

function cells(line: string): string[] {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()).slice(0, 50);
}

export function CodeBlock({ language, text }: { language: string; text: string }): VNode {
  const copy = () => void navigator.clipboard?.writeText(text);
  return (
    <figure class="code">
      <figcaption>
        <span>{language || "text"}</span>
        <button type="button" class="quiet" onClick={copy}>
          Copy
        </button>
      </figcaption>
      <pre tabIndex={0}>
        <code>{text}</code>
      </pre>
    </figure>
  );
}

const ITEM = /^(\s{0,12})([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Blocks of Markdown: headings, lists, quotes, code, tables, rules, paragraphs. */
export function render(source: string, depth = 0): VNode[] {
  const lines = (depth ? source : visible(source)).split("\n");
  const out: VNode[] = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at]!;
    const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})/.exec(line);
    if (fence) {
      const end = lines.findIndex((one, index) => index > at && one.trim().startsWith(fence[1]!) && !one.trim().replaceAll(fence[1]![0]!, ""));
      const stop = end < 0 ? lines.length : end;
      out.push(<CodeBlock language={fence[2]!} text={lines.slice(at + 1, stop).join("\n")} />);
      at = stop + 1;
      continue;
    }
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (heading) {
      const Tag = `h${Math.min(6, heading[1]!.length + 2)}` as "h3";
      out.push(<Tag>{inline(heading[2]!)}</Tag>);
      at += 1;
      continue;
    }
    if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      out.push(<hr />);
      at += 1;
      continue;
    }
    if (line.startsWith(">") && depth < DEEPEST) {
      const begin = at;
      while (at < lines.length && lines[at]!.startsWith(">")) at += 1;
      const quoted = lines.slice(begin, at).map((one) => one.replace(/^> ?/, ""));
      out.push(<blockquote>{render(quoted.join("\n"), depth + 1)}</blockquote>);
      continue;
    }
    if (ITEM.test(line) && depth < DEEPEST) {
      const [list, next] = renderList(lines, at, depth);
      out.push(list);
      at = next;
      continue;
    }
    if (line.includes("|") && isTableRule(lines[at + 1])) {
      const head = cells(line);
      const body: string[][] = [];
      at += 2;
      while (at < lines.length && lines[at]!.includes("|")) body.push(cells(lines[at++]!));
      out.push(
        <div class="scroll" tabIndex={0} role="region" aria-label="table">
          <table>
            <thead>
              <tr>{head.map((cell) => <th>{inline(cell)}</th>)}</tr>
            </thead>
            <tbody>{body.map((row) => <tr>{row.map((cell) => <td>{inline(cell)}</td>)}</tr>)}</tbody>
          </table>
        </div>,
      );
      continue;
    }
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    do at += 1;
    while (at < lines.length && lines[at]!.trim() && !/^(#{1,6}\s|>|\s{0,3}(`{3,}|~{3,}))/.test(lines[at]!) && !(depth < DEEPEST && ITEM.test(lines[at]!)));
    const text = lines.slice(begin, at);
    out.push(<p>{text.flatMap((one, index) => (index ? [<br />, ...inline(one)] : inline(one)))}</p>);
  }
  return out;
}

function renderList(lines: string[], from: number, depth: number): [VNode, number] {
  const first = ITEM.exec(lines[from]!)!;
  const indent = first[1]!.length;
  const isOrdered = /\d/.test(first[2]!);
  const items: string[][] = [];
  let at = from;
  while (at < lines.length) {
    const line = lines[at]!;
    const found = ITEM.exec(line);
    if (found && found[1]!.length <= indent + 1) {
      if (found[1]!.length < indent || /\d/.test(found[2]!) !== isOrdered) break;
      items.push([found[3]!]);
    } else if (line.trim() && /^\s{2,}/.test(line)) items.at(-1)!.push(line.replace(/^\s{2,4}/, ""));
    else if (!line.trim() && ITEM.test(lines[at + 1] ?? "")) items.at(-1)!.push("");
    else break;
    at += 1;
  }
  const body = items.map((item) => <li>{item.length > 1 ? render(item.join("\n"), depth + 1) : inline(item[0]!)}</li>);
  return [isOrdered ? <ol start={Number.parseInt(first[2]!, 10)}>{body}</ol> : <ul>{body}</ul>, at];
}

export function Markdown({ text }: { text: string }): VNode {
  return <div class="markdown">{render(text)}</div>;
}
