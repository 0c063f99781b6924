import { type VNode, render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { type ModelCard, type Settings, ServerError, getJson, keys } from "./api";
import { Chat } from "./chat";
import { Engine } from "./engine";
import { feed } from "./feed";
import { Learn } from "./learn";
import { readSetting, writeSetting } from "./store";
import { TimelineView } from "./timeline";

const TABS = [["chat", "Chat"], ["engine", "Engine"], ["timeline", "Timeline"], ["learn", "Learn"]] as const;
const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

function setTheme(theme: Theme): void {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function useHash(): [string, string] {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const listen = () => setHash(location.hash);
    addEventListener("hashchange", listen);
    return () => removeEventListener("hashchange", listen);
  }, []);
  const [tab = "chat", ...rest] = hash.replace(/^#/, "").split("/");
  return [TABS.some(([name]) => name === tab) ? tab : "chat", decodeURIComponent(rest.join("/"))];
}

function App(): VNode {
  const [tab, rest] = useHash();
  const [settings, setSettings] = useState<Settings | null>(null);
  const [models, setModels] = useState<ModelCard[]>([]);
  const [error, setError] = useState("");
  const [asks, setAsks] = useState(false);
  const [theme, chooseTheme] = useState<Theme>(() => readSetting<Theme>("theme", "auto"));
  useEffect(() => setTheme(theme), [theme]);

  async function load(): Promise<void> {
    try {
      const found = await getJson<Settings>("page/settings");
      setSettings(found);
      if (found.needs_key && !keys.user) {
        setAsks(true);
        return;
      }
      setModels((await getJson<{ data: ModelCard[] }>("v1/models")).data);
      setError("");
    } catch (problem) {
      if (problem instanceof ServerError && problem.status === 401) setAsks(true);
      setError(problem instanceof Error ? problem.message : String(problem));
    }
  }
  useEffect(() => void load(), []);

  const open = (id: string) => {
    location.hash = `timeline/${encodeURIComponent(id)}`;
  };
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  return (
    <>
      <header class="top">
        <a class="brand" href="#chat"><span class="mark" aria-hidden="true" />quire</a>
        <nav aria-label="Views">
          {TABS.map(([name, title]) => <a key={name} id={`tab-${name}`} href={`#${name}`} aria-current={tab === name ? "page" : undefined}>{title}</a>)}
        </nav>
        <div class="tools">
          {settings && (settings.needs_key || settings.has_admin) && <button type="button" class="quiet" id="keys" onClick={() => setAsks(true)}>Keys</button>}
          <button
            type="button"
            class="quiet"
            id="theme"
            aria-label={`Colours: ${theme}. Change to ${next}`}
            onClick={() => {
              chooseTheme(next);
              writeSetting("theme", next);
            }}
          >
            {theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾"}
          </button>
        </div>
      </header>
      <main>
        <h1 class="sr">quire {settings?.version}: {tab}</h1>
        {error && !asks && <p class="error banner" role="alert">{error} <button type="button" class="link" onClick={() => void load()}>Try again</button></p>}
        <Chat models={models} isShown={tab === "chat"} onTimeline={open} />
        {tab === "engine" && <Engine onTimeline={open} hasAdmin={settings?.has_admin} onKey={settings?.needs_key || settings?.has_admin ? () => setAsks(true) : undefined} />}
        {tab === "timeline" && <TimelineView id={rest} onOpen={open} />}
        {tab === "learn" && <Learn models={models} />}
      </main>
      {asks && settings && (
        <KeyDialog
          settings={settings}
          error={error}
          onDone={() => {
            setAsks(false);
            feed.restart();
            void load();
          }}
        />
      )}
    </>
  );
}

function KeyDialog({ settings, error, onDone }: { settings: Settings; error: string; onDone: () => void }): VNode {
  const [user, setUser] = useState(keys.user);
  const [admin, setAdmin] = useState(keys.admin);
  useEffect(() => document.getElementById(settings.needs_key ? "key-user" : "key-admin")?.focus(), []);
  return (
    <div class="veil" role="dialog" aria-modal="true" aria-labelledby="key-title">
      <form
        class="dialog"
        onKeyDown={(event) => {
          if (event.key === "Escape" && (keys.user || !settings.needs_key)) onDone();
        }}
        onSubmit={(event) => {
          event.preventDefault();
          keys.user = user.trim();
          keys.admin = admin.trim();
          onDone();
        }}
      >
        <h2 id="key-title">Keys</h2>
        <p>They stay in this tab and are sent only to this server.</p>
        {settings.needs_key && (
          <label>
            API key
            <input id="key-user" type="password" autocomplete="off" value={user} onInput={(event) => setUser(event.currentTarget.value)} />
          </label>
        )}
        {settings.has_admin && (
          <label>
            Admin key (optional): shows every request
            <input id="key-admin" type="password" autocomplete="off" value={admin} onInput={(event) => setAdmin(event.currentTarget.value)} />
          </label>
        )}
        {error && <p class="error" role="alert">{error}</p>}
        <div class="actions"><button type="submit" class="primary" id="key-save">Use</button></div>
      </form>
    </div>
  );
}

setTheme(readSetting<Theme>("theme", "auto"));
render(<App />, document.getElementById("app")!);
