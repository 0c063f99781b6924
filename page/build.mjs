// Compiles the page into quire/server/page/assets, with hashes in the names, and notes which sources it was made from.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const here = import.meta.dirname;
const target = join(here, "..", "quire", "server", "page", "assets");

/** The files that decide what is built, as tests/server/page/test_assets.py lists them. */
function sources() {
  const found = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((one) => one.isFile())
    .map((one) => join(one.parentPath, one.name).slice(here.length + 1).replaceAll("\\", "/"));
  return [...found, "build.mjs", "package-lock.json", "tsconfig.json"].sort();
}

function hashOf(names) {
  const hash = createHash("sha256");
  for (const name of names) {
    hash.update(name + "\0");
    hash.update(readFileSync(join(here, name)));
    hash.update("\0");
  }
  return hash.digest("hex");
}

const made = await build({
  entryPoints: [join(here, "src", "main.tsx"), join(here, "src", "style.css")],
  bundle: true,
  minify: true,
  write: false,
  outdir: target,
  format: "esm",
  target: ["es2022"],
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
});
rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
const names = {};
for (const file of made.outputFiles) {
  const [stem, kind] = file.path.split("/").pop().split(".");
  const name = `${stem}-${createHash("sha256").update(file.contents).digest("hex").slice(0, 10)}.${kind}`;
  writeFileSync(join(target, name), file.contents);
  names[`${stem}.${kind}`] = name;
}
const icon = readFileSync(join(here, "src", "icon.svg"));
names["icon.svg"] = `icon-${createHash("sha256").update(icon).digest("hex").slice(0, 10)}.svg`;
writeFileSync(join(target, names["icon.svg"]), icon);
let index = readFileSync(join(here, "src", "index.html"), "utf8");
for (const [plain, hashed] of Object.entries(names)) {
  index = index.replaceAll(`"${plain}"`, `"page/files/${hashed}"`);
}
writeFileSync(join(target, "index.html"), index);
const preact = JSON.parse(readFileSync(join(here, "node_modules", "preact", "package.json"), "utf8"));
const licence = readFileSync(join(here, "node_modules", "preact", "LICENSE"), "utf8");
writeFileSync(join(target, "LICENSES.txt"), `The page contains preact ${preact.version}:\n\n${licence}`);
const files = ["index.html", "LICENSES.txt", ...Object.values(names)].sort();
writeFileSync(join(target, "build.json"), JSON.stringify({ sources: hashOf(sources()), files }, null, 1) + "\n");
console.log(files.map((name) => `${name} ${readFileSync(join(target, name)).length} bytes`).join("\n"));
