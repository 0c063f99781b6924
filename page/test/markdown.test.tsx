import { render } from "preact";
import { describe, expect, it } from "vitest";
import { Markdown, safeHref, visible } from "../src/markdown";

function shown(text: string): HTMLElement {
  const box = document.createElement("div");
  render(<Markdown text={text} />, box);
  return box;
}

describe("Markdown", () => {
  it("renders headings, lists, code, tables and emphasis", () => {
    const box = shown("# Title\n\n- one\n- **two**\n\n```python\nprint('<b>')\n```\n\n| a | b |\n|---|---|\n| 1 | `2` |\n\nplain *soft* and snake_case_name");
    expect(box.querySelector("h3")?.textContent).toBe("Title");
    expect([...box.querySelectorAll("li")].map((one) => one.textContent)).toEqual(["one", "two"]);
    expect(box.querySelector("li strong")?.textContent).toBe("two");
    expect(box.querySelector("pre code")?.textContent).toBe("print('<b>')");
    expect([...box.querySelectorAll("td")].map((one) => one.textContent)).toEqual(["1", "2"]);
    expect(box.querySelector("em")?.textContent).toBe("soft");
    expect(box.textContent).toContain("snake_case_name");
  });

  it("never makes markup from text", () => {
    const hostile = "<script>alert(1)</script> <img src=x onerror=alert(1)> <iframe src=https://x></iframe>";
    const box = shown(hostile);
    expect(box.querySelectorAll("script, img, iframe").length).toBe(0);
    expect(box.textContent).toBe(hostile);
  });

  it.each(["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", " vbscript:x", "//evil.example", "file:///etc/passwd", "java\nscript:x"])(
    "makes no link to %s",
    (href) => {
      expect(safeHref(href)).toBeNull();
      expect(shown(`[click](${href.replace("\n", "")})`).querySelector("a")).toBeNull();
    },
  );

  it("opens links without access to this page", () => {
    const link = shown("see [it](https://example.org/a?b=1)").querySelector("a")!;
    expect(link.getAttribute("href")).toBe("https://example.org/a?b=1");
    expect(link.getAttribute("rel")).toContain("noopener");
  });

  it("shows control characters and those that turn text around", () => {
    expect(visible("a\u0000b\u001b[31m\u202ecba\r\n")).toBe("a␀b␛[31m\ufffdcba\n");
  });

  it("takes huge lines and deep nesting in little time", () => {
    const begin = performance.now();
    for (const text of ["*".repeat(50_000), "[".repeat(50_000), "`".repeat(20_001), ">".repeat(10_000), `${"- ".repeat(3000)}x`, "a ".repeat(100_000), "_a".repeat(9000), "**a".repeat(6000), `|${"a|".repeat(5000)}\n|-|\n`]) {
      shown(text);
    }
    expect(performance.now() - begin).toBeLessThan(10_000);
  });
});
