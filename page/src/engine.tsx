import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { BlockMap } from "./blockmap";
import { LineChart, RowStrip, StepChart } from "./charts";
import { type FeedState, type Frame, type Row, feed } from "./feed";
import { useFeed } from "./hooks";
import { AdapterPanel, EnergyPanel, EnginePanel, ExpertPanel, Panel, RankPanel, SpeculationPanel, TierPanel, percent } from "./panels";

const SHOWN_ROWS = 40;

/** In a word; the detail beside it says it with numbers. */
const REASONS: Record<string, string> = { share: "fair share", draws: "last draws", encoder: "images", order: "order" };

function ms(value: number | undefined): string {
  return !value ? "–" : value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

/** Requests without a row: those in the queue, and those whose grammar or adapter is not ready. */
function waitingOf(frame: Frame): number {
  return (frame.waiting ?? 0) + (frame.compiling ?? 0);
}

function Figure({ name, value, more, id }: { name: string; value: string; more?: string; id?: string }): VNode {
  return (
    <div class="figure">
      <span class="name">{name}</span>
      <b id={id}>{value}</b>
      <span class="more">{more ?? " "}</span>
    </div>
  );
}

interface Props {
  onTimeline: (id: string) => void;
  /** Asks for keys; absent on a server that has none. */
  onKey?: () => void;
  hasAdmin?: boolean;
}

export function Engine({ onTimeline, onKey, hasAdmin }: Props): VNode {
  const state = useFeed()!;
  const status = feed.status;
  const frame = state.frame;
  if (status.kind === "failed" && [401, 403].includes(status.status)) {
    return (
      <div class="notice">
        <h2>The engine's figures need a key</h2>
        <p>{status.message}</p>
        {onKey && <button type="button" class="primary" onClick={onKey}>Enter a key</button>}
      </div>
    );
  }
  if (!frame) {
    return <div class="notice" role="status"><p>{status.kind === "failed" ? status.message : "Connecting to the engine…"}</p></div>;
  }
  if (frame.status) return <div class="notice" role="status"><h2>The engine is not running</h2><p>{frame.status}</p></div>;
  return <Live state={state} onTimeline={onTimeline} onKey={onKey} hasAdmin={hasAdmin} />;
}

function Live({ state, onTimeline, onKey, hasAdmin }: Props & { state: FeedState }): VNode {
  const frame = state.frame!;
  const counters = frame.counters ?? {};
  const rows = frame.rows ?? [];
  const replicas = state.slow?.replicas ?? [];
  const queried = counters.queried_tokens ?? 0;
  const blocks = Object.values(frame.counts ?? {}).reduce((sum, one) => sum + one, 0);
  const free = (frame.counts?.empty ?? 0) + (frame.counts?.cached ?? 0);
  return (
    <div class="engine">
      <div class="bar">
        <span class="live" role="status"><i class={feed.status.kind} />{feed.status.kind === "live" ? "Live" : "Reconnecting…"}</span>
        <label>
          Rate
          <select id="rate" value={feed.options.hz} onChange={(event) => feed.restart({ hz: Number(event.currentTarget.value) })}>
            {[2, 4, 10].map((hz) => <option key={hz} value={hz}>{hz} Hz</option>)}
          </select>
        </label>
        {replicas.length > 1 && (
          <label>
            Engine
            <select value={feed.options.replica} onChange={(event) => feed.restart({ replica: Number(event.currentTarget.value) })}>
              {replicas.map((_, number) => <option key={number} value={number}>{number}</option>)}
            </select>
          </label>
        )}
        <span class="note">
          {frame.scope === "admin" ? "Everything is shown." : "Your own requests are shown, and public figures."}{" "}
          {frame.scope === "tenant" && hasAdmin && <button type="button" class="link" onClick={onKey}>Use an admin key</button>}
        </span>
      </div>
      <div class="figures">
        <Figure name="Generated" id="out-rate" value={state.mean("out").toFixed(1)} more="tokens/s" />
        <Figure name="Prompts" value={state.mean("prompt").toFixed(0)} more="tokens/s" />
        <Figure name="Rows" id="running" value={`${counters.running ?? 0}`} more={`of ${frame.row_count}`} />
        <Figure name="Waiting" id="waiting" value={`${waitingOf(frame) + (frame.loading ?? 0)}`} more={frame.loading ? `${frame.loading} loading` : "requests"} />
        <Figure name="Blocks in use" value={percent(blocks ? 1 - free / blocks : 0)} more={`${(blocks - free).toLocaleString()} of ${blocks.toLocaleString()}`} />
        <Figure name="Prefix hits" value={percent(queried ? (counters.cached_tokens ?? 0) / queried : 0)} more="of prompt tokens" />
        <Figure name="First token" value={ms(frame.latency?.first_median)} more={`95%: ${ms(frame.latency?.first_p95)}`} />
        <Figure name="Each token" value={ms(frame.latency?.token_median)} more={`95%: ${ms(frame.latency?.token_p95)}`} />
      </div>
      <Panel title="Blocks" note={`${frame.block_size} tokens each; a colour is a request, a dot means shared`}>
        {state.host.cells.length > 0 && <h3>On the device</h3>}
        <BlockMap state={state} />
        {state.host.cells.length > 0 && (
          <>
            <h3>In host memory</h3>
            <BlockMap state={state} tier="host" />
          </>
        )}
      </Panel>
      <Queue state={state} onTimeline={onTimeline} />
      <div class="columns">
        <LineChart
          title="Throughput"
          unit="tokens/s"
          lines={[
            { name: "generated", colour: "#3d8b8b", values: state.samples.map((one) => one.out) },
            { name: "prompts", colour: "#d18f2c", values: state.samples.map((one) => one.prompt) },
          ]}
        />
        <LineChart
          title="Requests"
          unit=""
          lines={[
            { name: "running", colour: "#3d8b8b", values: state.samples.map((one) => one.running) },
            { name: "waiting", colour: "#c2573f", values: state.samples.map((one) => one.waiting) },
          ]}
        />
        <LineChart
          title="Time to the first token"
          unit="" format={ms}
          lines={[
            { name: "median", colour: "#3d8b8b", values: state.samples.map((one) => one.first) },
            { name: "95%", colour: "#d18f2c", values: state.samples.map((one) => one.firstSlow) },
          ]}
        />
        <LineChart
          title="Time of each token"
          unit="" format={ms}
          lines={[
            { name: "median", colour: "#3d8b8b", values: state.samples.map((one) => one.token) },
            { name: "95%", colour: "#d18f2c", values: state.samples.map((one) => one.tokenSlow) },
          ]}
        />
        <StepChart steps={state.steps} />
        <LineChart title="Step time" unit="" format={ms} lines={[{ name: "step", colour: "#6b7fb3", values: state.steps.map((step) => step[2]) }]} />
        <LineChart title="Prefix hits" unit="% of prompt tokens" top={100} lines={[{ name: "cached", colour: "#5d86b8", values: state.samples.map((one) => 100 * one.hits) }]} />
        {state.slow?.energy?.joules !== undefined && (
          <LineChart
            title="Power"
            unit="W"
            lines={[
              { name: "drawn", colour: "#b3612f", values: state.samples.map((one) => one.watts) },
              ...(state.slow.energy.budget ? [{ name: "budget", colour: "#9aa6ab", values: state.samples.map(() => state.slow!.energy!.budget!) }] : []),
            ]}
          />
        )}
      </div>
      <Panel title="Rows" note={`${counters.running ?? 0} of ${frame.row_count}${frame.hidden ? `, ${frame.hidden} of other tenants` : ""}`}>
        <RowStrip rows={rows} count={frame.row_count ?? 0} />
        <RowTable rows={rows} onTimeline={onTimeline} />
      </Panel>
      <div class="flow">
        <TierPanel state={state} />
        {(frame.tenants?.length ?? 0) > 0 && (
          <Panel title="Tenants">
            <div class="scroll" tabIndex={0} role="region" aria-label="Tenants">
              <table>
                <thead><tr><th>tenant</th><th>rows</th><th>waiting</th><th>blocks</th><th>tokens</th></tr></thead>
                <tbody>
                  {frame.tenants!.map((one) => (
                    <tr key={one.name}><td>{one.name || "(none)"}</td><td>{one.rows}</td><td>{one.waiting}</td><td>{one.blocks}</td><td>{one.tokens.toLocaleString()}</td></tr>
                  ))}
                </tbody>
              </table>
            </div>
          </Panel>
        )}
        <SpeculationPanel state={state} />
        <ExpertPanel state={state} />
        <AdapterPanel state={state} />
        <EnergyPanel state={state} />
        <RankPanel state={state} />
        <EnginePanel state={state} />
      </div>
    </div>
  );
}

function Queue({ state, onTimeline }: { state: FeedState; onTimeline: (id: string) => void }): VNode | null {
  const queue = state.frame?.queue ?? [];
  if (!queue.length) return null;
  const count = Math.max(queue.length, waitingOf(state.frame!));
  return (
    <Panel title="Waiting" note={`${count === 1 ? "1 request" : `${count} requests`}, in the order in which they are admitted`}>
      <div class="scroll" tabIndex={0} role="region" aria-label="Waiting requests">
        <table id="queue">
          <thead><tr><th>request</th><th>why</th><th>tokens</th><th>seconds</th></tr></thead>
          <tbody>
            {queue.slice(0, SHOWN_ROWS).map((one) => (
              <tr key={one.name}>
                <td><button type="button" class="link" onClick={() => onTimeline(one.name)}>{one.name}</button></td>
                <td><span class={`badge ${one.reason}`}>{REASONS[one.reason] ?? one.reason}</span> {one.detail}{one.preemptions ? ` (preempted ${one.preemptions === 1 ? "once" : `${one.preemptions} times`})` : ""}</td>
                <td>{one.tokens}</td>
                <td>{one.seconds.toFixed(1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {count > SHOWN_ROWS && <p class="note">and {count - Math.min(queue.length, SHOWN_ROWS)} more</p>}
    </Panel>
  );
}

/** What a row of the table does, or where it is. */
export function what(row: Row): string {
  if (row[2] === "swapped") return "swapped out, in host memory";
  if (row[2] === "session") return "idle, on the device";
  if (row[2] !== "asleep") return row[2];
  return { host: "asleep, in host memory", disk: "asleep, on disk" }[row[13]] ?? "asleep, its blocks were dropped";
}

function RowTable({ rows, onTimeline }: { rows: Row[]; onTimeline: (id: string) => void }): VNode | null {
  const [filter, setFilter] = useState("");
  if (!rows.length) return <p class="note">No request holds blocks now.</p>;
  const found = filter ? rows.filter((row) => `${row[2]} ${row[3]} ${row[4]} ${row[5]} ${row[12]}`.includes(filter)) : rows;
  const hasAdapters = rows.some((row) => row[12]);
  return (
    <>
      {rows.length > SHOWN_ROWS && <input type="search" aria-label="Filter rows" placeholder={`Filter ${rows.length} rows`} value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />}
      <div class="scroll" tabIndex={0} role="region" aria-label="Rows">
        <table>
          <thead><tr><th>row</th><th>request or session</th><th>does</th><th>tokens</th><th>blocks</th><th>shared</th>{hasAdapters && <th>adapter</th>}</tr></thead>
          <tbody>
            {found.slice(0, SHOWN_ROWS).map((row) => (
              <tr key={`${row[2]}-${row[3]}`}>
                <td>{row[0] >= 0 ? row[0] : ""}</td>
                <td>{row[2] === "session" || row[2] === "asleep" ? `session ${row[3]}` : <button type="button" class="link" onClick={() => onTimeline(row[3])}>{row[3]}</button>}</td>
                <td>{what(row)}</td>
                <td>{row[7]}{row[9] ? ` of ${row[9]}` : ""}</td>
                <td>{row[10]}</td>
                <td>{row[11]}</td>
                {hasAdapters && <td>{row[12]}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {found.length > SHOWN_ROWS && <p class="note">and {found.length - SHOWN_ROWS} more</p>}
    </>
  );
}
