// What the engine is made of and what else it counts: panels that show only what is in use.
import type { ComponentChildren, VNode } from "preact";
import { ExpertHeat } from "./charts";
import { type FeedState, decode } from "./feed";

export function percent(value: number): string {
  return `${(100 * value).toFixed(0)}%`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function Panel({ title, children, note }: { title: string; children: ComponentChildren; note?: string }): VNode {
  return (
    <section class="panel" aria-label={title}>
      <h2>{title}{note ? <small>{note}</small> : null}</h2>
      {children}
    </section>
  );
}

function times(count: number): string {
  return count === 1 ? "once" : `${count} times`;
}

interface Part {
  label: string;
  value: number;
  kind: string;
}

/** A bar of parts of a whole, and the same in words. */
function Bar({ label, parts, total, text }: { label: string; parts: Part[]; total: number; text: string }): VNode {
  return (
    <div class="tier">
      <span>{label}</span>
      <div class="stack" role="img" aria-label={`${label}: ${text}`}>
        {parts.map((part) => <i key={part.label} class={part.kind} style={{ width: `${(100 * part.value) / Math.max(1, total)}%` }} />)}
      </div>
      <span>{text}</span>
    </div>
  );
}

export function TierPanel({ state }: { state: FeedState }): VNode {
  const tiers = state.frame?.tiers;
  const counts = state.frame?.counts ?? {};
  const counters = state.frame?.counters ?? {};
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
  const cached = counts.cached ?? 0;
  const used = total - (counts.empty ?? 0) - cached;
  const { host, disk, transfers, pressure } = tiers ?? {};
  const moving = (transfers?.out ?? 0) + (transfers?.back ?? 0) + (transfers?.writes ?? 0);
  const pressed = Object.entries(pressure ?? {}).filter(([, level]) => level > 0).map(([tier]) => (tier === "host" ? "host memory" : tier));
  const number = (value: number) => value.toLocaleString();
  return (
    <Panel title="Tiers">
      <Bar
        label="Device"
        total={total}
        parts={[{ label: "in use", value: used, kind: "held" }, { label: "cached", value: cached, kind: "cached" }]}
        text={`${number(used)} in use, ${number(cached)} cached, of ${number(total)} blocks`}
      />
      {host && (
        <Bar
          label="Host memory"
          total={host.slots}
          parts={[{ label: "owned", value: host.owned, kind: "held" }, { label: "cached", value: host.used - host.owned, kind: "cached" }]}
          text={`${number(host.owned)} of sessions and swapped requests, ${number(host.used - host.owned)} cached, of ${number(host.slots)} blocks; ${bytes(host.used * host.block_bytes)}`}
        />
      )}
      {disk && (
        <Bar
          label="Disk"
          total={Math.max(disk.blocks, Math.floor(disk.capacity / Math.max(1, disk.block_bytes)))}
          parts={[{ label: "owned", value: disk.owned, kind: "held" }, { label: "cached", value: disk.blocks - disk.owned, kind: "cached" }]}
          text={`${number(disk.owned)} of sessions, ${number(disk.blocks - disk.owned)} cached; files of ${bytes(disk.disk_bytes)}, at most ${bytes(disk.capacity)}${disk.is_paused ? "; writing is paused: the disk is full or fails" : ""}`}
        />
      )}
      {!host && <p class="note">No tier below the device is in use.</p>}
      {moving > 0 && <p class="note">In transfer: {transfers!.out} blocks to host memory, {transfers!.back} back to the device, {transfers!.writes} to disk.</p>}
      {(counters.preemptions ?? 0) > 0 && <p class="note">Requests were preempted {times(counters.preemptions!)} so far, and swapped out {times(counters.swaps ?? 0)}.</p>}
      {pressed.length > 0 && <p class="note">Nearly full: {pressed.join(", ")}.</p>}
    </Panel>
  );
}

export function SpeculationPanel({ state }: { state: FeedState }): VNode | null {
  const drafts = state.slow?.speculation ?? {};
  const count = drafts.num_drafts ?? 0;
  if (!("num_drafts" in drafts)) return null;
  const accepted = state.slow?.acceptance ?? [];
  const proposed = drafts.num_draft_tokens ?? 0;
  return (
    <Panel title="Speculation" note={count ? `${(1 + (drafts.num_accepted_tokens ?? 0) / count).toFixed(2)} tokens a step that verified drafts` : "no drafts yet"}>
      {accepted.map((one, place) => (
        <Bar
          key={place}
          label={`Draft ${place + 1}`}
          total={count}
          parts={[{ label: "accepted", value: one, kind: "drafts" }]}
          text={`accepted in ${percent(count ? one / count : 0)} of ${count.toLocaleString()}`}
        />
      ))}
      <p class="note">
        {(drafts.num_accepted_tokens ?? 0).toLocaleString()} of {proposed.toLocaleString()} drafts were accepted.
        {drafts.drafts_per_decode !== undefined && ` Chosen now: ${drafts.drafts_per_decode} drafts a decode.`}
      </p>
    </Panel>
  );
}

export function ExpertPanel({ state }: { state: FeedState }): VNode | null {
  const map = state.slow?.expert_map;
  if (!map) return null;
  const loads = Object.entries(state.slow?.experts ?? {});
  const [layer, worst] = loads.reduce((most, one) => (one[1] > most[1] ? one : most), ["", 0] as [string, number]);
  return (
    <Panel title="Experts" note={`${map.experts} in each of ${map.layers.length} layers`}>
      <ExpertHeat layers={map.layers} experts={map.experts} loads={decode(map.loads)} />
      <p class="note">
        A line is a layer, a cell an expert; darker: chosen more often. The busiest one has {worst.toFixed(2)} times its share, in layer {layer}.
        {(state.slow?.rank_skew ?? 0) > 0 && ` Over ranks: ${state.slow!.rank_skew!.toFixed(2)} times.`}
      </p>
    </Panel>
  );
}

export function AdapterPanel({ state }: { state: FeedState }): VNode | null {
  const adapters = state.frame?.adapters;
  if (!adapters) return null;
  const [slots, loaded, held, awaited] = adapters;
  const figures = state.slow?.adapters ?? {};
  return (
    <Panel title="Adapters" note={`${loaded.length} of ${slots} slots on the device`}>
      <ul class="chips">
        {loaded.map((name) => <li key={name} class={held.includes(name) ? "held" : ""}>{name}{held.includes(name) ? " (in use)" : ""}</li>)}
        {awaited.map((name) => <li key={`awaited ${name}`} class="awaited">{name} (requests wait for it)</li>)}
      </ul>
      {!loaded.length && !awaited.length && <p class="note">None is loaded: the first request that names one loads it.</p>}
      {(figures.loads ?? 0) > 0 && (
        <p class="note">
          So far: loaded {times(figures.loads!)}, evicted {times(figures.evictions ?? 0)}{figures.load_failures ? `, ${figures.load_failures} failed` : ""}.
        </p>
      )}
    </Panel>
  );
}

export function EnergyPanel({ state }: { state: FeedState }): VNode | null {
  const energy = state.slow?.energy;
  if (energy?.joules === undefined) return null;
  const tokens = state.frame?.counters?.generated_tokens ?? 0;
  const each = tokens ? (energy.decode ?? 0) / tokens : 0;
  const joules = (value: number | undefined) => `${(value ?? 0) < 10_000 ? (value ?? 0).toFixed(1) : ((value ?? 0) / 1000).toFixed(1) + " k"}${(value ?? 0) < 10_000 ? " " : ""}J`;
  return (
    <Panel title="Energy" note={energy.is_estimated ? "estimated from the time that processors were busy" : "measured"}>
      <dl>
        <dt>Now</dt><dd>{(energy.watts ?? 0).toFixed(1)} W{energy.budget ? ` of a budget of ${energy.budget} W` : ""}</dd>
        <dt>So far</dt><dd>{joules(energy.joules)}: {joules(energy.prompt)} for prompts, {joules(energy.decode)} for generated tokens, {joules(energy.idle)} idle</dd>
        {each > 0 && <><dt>A token</dt><dd>{each < 1 ? `${(1000 * each).toFixed(1)} mJ` : `${each.toFixed(2)} J`} on average</dd></>}
        {(energy.held_seconds ?? 0) > 0 && <><dt>Held back</dt><dd>{energy.held_seconds!.toFixed(1)} s, to keep the budget or to save</dd></>}
      </dl>
    </Panel>
  );
}

export function RankPanel({ state }: { state: FeedState }): VNode | null {
  const { ranks, replicas = [] } = state.slow ?? {};
  if (!ranks && replicas.length < 2) return null;
  const stages = Array.from({ length: ranks?.pipeline ?? 1 }, (_, stage) => stage);
  const columns = Array.from({ length: ranks?.tensor ?? 1 }, (_, rank) => rank);
  return (
    <Panel title="Ranks and replicas">
      {ranks && (
        <>
          <table class="ranks" aria-label="Ranks of an engine">
            <tbody>
              {stages.map((stage) => (
                <tr key={stage}>
                  <th scope="row">{stages.length > 1 ? `Stage ${stage}` : "Every layer"}</th>
                  {columns.map((rank) => <td key={rank}>rank {stage * columns.length + rank}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
          <p class="note">
            {[
              columns.length > 1 ? `Each layer is split over ${columns.length} ranks.` : "",
              stages.length > 1 ? `The layers are divided into ${stages.length} stages, one after the other.` : "",
              ranks.experts > 1 ? `Whole experts are placed on ${ranks.experts} ranks.` : "",
            ].filter(Boolean).join(" ")}
          </p>
        </>
      )}
      {replicas.length > 1 && (
        <table id="replicas">
          <thead><tr><th>engine</th><th>state</th><th>running</th><th>waiting</th><th>blocks</th><th>tokens</th></tr></thead>
          <tbody>
            {replicas.map((one, number) => (
              <tr key={number}>
                <td>{number}</td><td>{one.status}</td><td>{one.running}</td><td>{one.waiting}</td><td>{one.blocks_used.toLocaleString()}</td><td>{one.generated_tokens.toLocaleString()}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Panel>
  );
}

export function EnginePanel({ state }: { state: FeedState }): VNode | null {
  const slow = state.slow;
  if (!slow) return null;
  return (
    <Panel title="Engine">
      <dl>
        <dt>State</dt><dd>{slow.status}</dd>
        {(slow.restarts ?? 0) > 0 && <><dt>Restarts</dt><dd>{slow.restarts}</dd></>}
        <dt>A step</dt><dd>at most {state.frame?.budget?.toLocaleString()} tokens and {state.frame?.row_count?.toLocaleString()} rows</dd>
        {slow.sessions?.sessions !== undefined && <><dt>Sessions</dt><dd>{slow.sessions.sessions}, {slow.sessions.sessions_on_device ?? 0} on the device</dd></>}
        <dt>This view</dt><dd>took {state.frame?.cost_ms?.toFixed(2)} ms of the engine's time. Views are made only while someone looks.</dd>
      </dl>
    </Panel>
  );
}
