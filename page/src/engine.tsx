import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";
import { BlockMap } from "./blockmap";
import { LineChart, RowStrip, StepChart } from "./charts";
import { type FeedState, type Row, feed } from "./feed";
import { useFeed } from "./hooks";

const SHOWN_ROWS = 40;

export const REASONS: Record<string, string> = {
  grammar: "its grammar is compiled",
  quarantine: "requests run one at a time after a failed step",
  draws: "its last draws are not collected",
  share: "its tenant has its share",
  rows: "no row is free",
  blocks: "too few blocks are free",
  memory: "memory is short",
  budget: "the step's tokens are used up",
  order: "others come first",
};

function percent(value: number): string {
  return `${(100 * value).toFixed(0)}%`;
}

function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

function ms(value: number | undefined): string {
  return !value ? "–" : value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
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

function Panel({ title, children, note }: { title: string; children: ComponentChildren; note?: string }): VNode {
  return (
    <section class="panel" aria-label={title}>
      <h2>{title}{note ? <small>{note}</small> : null}</h2>
      {children}
    </section>
  );
}

export function Engine({ onTimeline, onKey }: { onTimeline: (id: string) => void; onKey: () => void }): VNode {
  const state = useFeed()!;
  const status = feed.status;
  const frame = state.frame;
  if (status.kind === "failed" && [401, 403].includes(status.status)) {
    return (
      <div class="notice">
        <h2>The engine's figures need a key</h2>
        <p>{status.message}</p>
        <button type="button" class="primary" onClick={onKey}>Enter a key</button>
      </div>
    );
  }
  if (!frame) {
    return <div class="notice" role="status"><p>{status.kind === "failed" ? status.message : "Connecting to the engine…"}</p></div>;
  }
  if (frame.status) return <div class="notice" role="status"><h2>The engine is not running</h2><p>{frame.status}</p></div>;
  return <Live state={state} onTimeline={onTimeline} onKey={onKey} />;
}

function Live({ state, onTimeline, onKey }: { state: FeedState; onTimeline: (id: string) => void; onKey: () => void }): VNode {
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
          {frame.scope === "tenant" && <button type="button" class="link" onClick={onKey}>Use an admin key</button>}
        </span>
      </div>
      <div class="figures">
        <Figure name="Generated" id="out-rate" value={state.mean("out").toFixed(1)} more="tokens/s" />
        <Figure name="Prompts" value={state.mean("prompt").toFixed(0)} more="tokens/s" />
        <Figure name="Rows" id="running" value={`${counters.running ?? 0}`} more={`of ${frame.row_count}`} />
        <Figure name="Waiting" id="waiting" value={`${(frame.waiting ?? 0) + (frame.loading ?? 0) + (frame.compiling ?? 0)}`} more={frame.loading ? `${frame.loading} loading` : "requests"} />
        <Figure name="Blocks in use" value={percent(blocks ? 1 - free / blocks : 0)} more={`${(blocks - free).toLocaleString()} of ${blocks.toLocaleString()}`} />
        <Figure name="Prefix hits" value={percent(queried ? (counters.cached_tokens ?? 0) / queried : 0)} more="of prompt tokens" />
        <Figure name="First token" value={ms(frame.latency?.first_median)} more={`95%: ${ms(frame.latency?.first_p95)}`} />
        <Figure name="Each token" value={ms(frame.latency?.token_median)} more={`95%: ${ms(frame.latency?.token_p95)}`} />
      </div>
      <Panel title="Blocks" note={`${frame.block_size} tokens each; a colour is a request, a dot means shared`}>
        <BlockMap state={state} />
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
        <StepChart steps={state.steps} />
        <LineChart title="Step time" unit="ms" lines={[{ name: "step", colour: "#6b7fb3", values: state.steps.map((step) => step[2]) }]} />
      </div>
      <Panel title="Rows" note={`${counters.running ?? 0} of ${frame.row_count}${frame.hidden ? `, ${frame.hidden} of other tenants` : ""}`}>
        <RowStrip rows={rows} count={frame.row_count ?? 0} />
        <RowTable rows={rows} onTimeline={onTimeline} />
      </Panel>
      <div class="columns">
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
        <More state={state} />
      </div>
      <p class="note">Making this view took {frame.cost_ms?.toFixed(2)} ms of the engine's time. Views are made only while someone looks.</p>
    </div>
  );
}

function Queue({ state, onTimeline }: { state: FeedState; onTimeline: (id: string) => void }): VNode | null {
  const queue = state.frame?.queue ?? [];
  if (!queue.length) return null;
  return (
    <Panel title="Waiting" note={`${state.frame!.waiting ?? queue.length} requests, in the order in which they are admitted`}>
      <div class="scroll" tabIndex={0} role="region" aria-label="Waiting requests">
        <table id="queue">
          <thead><tr><th>request</th><th>why</th><th>tokens</th><th>seconds</th></tr></thead>
          <tbody>
            {queue.slice(0, SHOWN_ROWS).map((one) => (
              <tr key={one.name}>
                <td><button type="button" class="link" onClick={() => onTimeline(one.name)}>{one.name}</button></td>
                <td><span class={`badge ${one.reason}`}>{REASONS[one.reason] ?? one.reason}</span> {one.detail}{one.preemptions ? ` (preempted ${one.preemptions} times)` : ""}</td>
                <td>{one.tokens}</td>
                <td>{one.seconds.toFixed(1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function RowTable({ rows, onTimeline }: { rows: Row[]; onTimeline: (id: string) => void }): VNode | null {
  const [filter, setFilter] = useState("");
  if (!rows.length) return <p class="note">No request holds blocks now.</p>;
  const found = filter ? rows.filter((row) => `${row[3]} ${row[4]} ${row[5]}`.includes(filter)) : rows;
  return (
    <>
      {rows.length > SHOWN_ROWS && <input type="search" aria-label="Filter rows" placeholder={`Filter ${rows.length} rows`} value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />}
      <div class="scroll" tabIndex={0} role="region" aria-label="Rows">
        <table>
          <thead><tr><th>row</th><th>request or session</th><th>does</th><th>tokens</th><th>blocks</th><th>shared</th></tr></thead>
          <tbody>
            {found.slice(0, SHOWN_ROWS).map((row) => (
              <tr key={`${row[0]}-${row[3]}`}>
                <td>{row[0] >= 0 ? row[0] : ""}</td>
                <td>{row[2] === "session" ? `session ${row[3]}` : <button type="button" class="link" onClick={() => onTimeline(row[3])}>{row[3]}</button>}</td>
                <td>{row[2]}</td>
                <td>{row[7]}{row[9] ? ` of ${row[9]}` : ""}</td>
                <td>{row[10]}</td>
                <td>{row[11]}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {found.length > SHOWN_ROWS && <p class="note">and {found.length - SHOWN_ROWS} more</p>}
    </>
  );
}

function Bar({ label, used, total, text }: { label: string; used: number; total: number; text: string }): VNode {
  return (
    <div class="tier">
      <span>{label}</span>
      <meter min={0} max={Math.max(1, total)} value={used} aria-label={`${label}: ${text}`} />
      <span>{text}</span>
    </div>
  );
}

function TierPanel({ state }: { state: FeedState }): VNode {
  const tiers = state.frame?.tiers;
  const counts = state.frame?.counts ?? {};
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
  const used = total - (counts.empty ?? 0) - (counts.cached ?? 0);
  const moving = (tiers?.transfers.out ?? 0) + (tiers?.transfers.back ?? 0) + (tiers?.transfers.writes ?? 0);
  return (
    <Panel title="Tiers">
      <Bar label="Device" used={used} total={total} text={`${used.toLocaleString()} in use, ${(counts.cached ?? 0).toLocaleString()} cached, of ${total.toLocaleString()} blocks`} />
      {tiers?.host && <Bar label="Host memory" used={tiers.host.used} total={tiers.host.slots} text={`${tiers.host.used.toLocaleString()} of ${tiers.host.slots.toLocaleString()} blocks, ${bytes(tiers.host.used * tiers.host.block_bytes)}`} />}
      {tiers?.disk && <Bar label="Disk" used={tiers.disk.disk_bytes} total={tiers.disk.capacity} text={`${tiers.disk.blocks.toLocaleString()} blocks, ${bytes(tiers.disk.disk_bytes)} of ${bytes(tiers.disk.capacity)}`} />}
      {!tiers?.host && <p class="note">No tier below the device is in use.</p>}
      {moving > 0 && <p class="note">{tiers!.transfers.out} blocks go to host memory, {tiers!.transfers.back} come back, {tiers!.transfers.writes} are written to disk.</p>}
      {(state.frame?.counters?.preemptions ?? 0) > 0 && <p class="note">{state.frame!.counters!.preemptions} preemptions so far, {state.frame!.counters!.swaps} of them swapped.</p>}
    </Panel>
  );
}

function More({ state }: { state: FeedState }): VNode | null {
  const slow = state.slow;
  if (!slow) return null;
  const drafts = slow.speculation ?? {};
  const experts = Object.entries(slow.experts ?? {});
  const energy = Object.entries(slow.energy ?? {});
  const draws = drafts.num_drafts ?? 0;
  return (
    <Panel title="Engine">
      <dl>
        <dt>State</dt><dd>{slow.status}</dd>
        {(slow.restarts ?? 0) > 0 && <><dt>Restarts</dt><dd>{slow.restarts}</dd></>}
        {(slow.ranks ?? 1) > 1 && <><dt>Ranks</dt><dd>{slow.ranks}</dd></>}
        {slow.sessions?.sessions !== undefined && <><dt>Sessions</dt><dd>{slow.sessions.sessions}, {slow.sessions.sessions_on_device ?? 0} on the device</dd></>}
        {draws > 0 && <><dt>Drafts</dt><dd>{(1 + (drafts.num_accepted_tokens ?? 0) / draws).toFixed(2)} tokens a draw that verified drafts; accepted by place {(slow.acceptance ?? []).join(", ")}</dd></>}
        {experts.length > 0 && <><dt>Experts</dt><dd>busiest over mean: {Math.max(...experts.map(([, load]) => load)).toFixed(2)} (worst of {experts.length} layers)</dd></>}
        {energy.map(([name, value]) => <><dt>{name.replaceAll("_", " ")}</dt><dd>{value.toFixed(1)}</dd></>)}
        {(slow.replicas ?? []).map((one, number) => <><dt>Replica {number}</dt><dd>{one.status}; {one.running} running, {one.waiting} waiting, {one.blocks_used} blocks</dd></>)}
      </dl>
    </Panel>
  );
}
