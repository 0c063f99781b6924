// Where a message is written: text, and images that are chosen, pasted or dropped.
import type { RefObject, VNode } from "preact";
import { useRef, useState } from "preact/hooks";
import { type ModelCard, seesImages } from "./api";
import { filesOf, readImage } from "./images";

interface Props {
  card: ModelCard | undefined;
  isBusy: boolean;
  /** Called with the function that adds files, for what is dropped elsewhere. */
  adder: RefObject<(files: File[]) => void>;
  onSend: (text: string, images: string[]) => void;
  onStop: () => void;
}

export function Composer({ card, isBusy, adder, onSend, onStop }: Props): VNode {
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const field = useRef<HTMLTextAreaElement>(null);
  const sees = seesImages(card);
  const blind = `${card?.id ?? "The model"} reads text only: it cannot see images.`;
  const isReady = Boolean(card) && (draft.trim() !== "" || images.length > 0);

  async function add(files: File[]): Promise<void> {
    setProblem("");
    if (!files.length) return;
    if (!sees) {
      setProblem(blind);
      return;
    }
    for (const file of files) {
      try {
        const url = await readImage(file);
        setImages((known) => [...known, url]);
      } catch (error) {
        setProblem(error instanceof Error ? error.message : String(error));
      }
    }
    field.current?.focus();
  }
  adder.current = (files) => void add(files);

  function send(): void {
    if (isBusy || !isReady) return;
    if (images.length && !sees) {
      setProblem(`${blind} Remove them to send the text.`);
      return;
    }
    onSend(draft, images);
    setDraft("");
    setImages([]);
    setProblem("");
  }

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {problem && <p class="error" role="alert" id="image-problem">{problem}</p>}
      {images.length > 0 && (
        <div class="thumbs">
          {images.map((url, index) => (
            <button
              type="button"
              key={index}
              aria-label={`Remove image ${index + 1}`}
              title="Remove"
              onClick={() => {
                setImages(images.filter((_, place) => place !== index));
                field.current?.focus();
              }}
            >
              <img src={url} alt="" />
              <span aria-hidden="true">×</span>
            </button>
          ))}
        </div>
      )}
      <textarea
        ref={field}
        id="draft"
        aria-label="Message"
        placeholder={sees ? "Message, or paste an image…" : "Message…"}
        rows={2}
        value={draft}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onPaste={(event) => {
          const files = filesOf(event.clipboardData);
          if (!files.length) return;
          event.preventDefault();
          void add(files);
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            send();
          }
          if (event.key === "Escape") onStop();
        }}
      />
      <div class="actions">
        {sees && (
          <label class="button quiet">
            Image
            <input
              type="file"
              id="image"
              class="sr"
              accept="image/*"
              multiple
              onChange={(event) => {
                const files = [...(event.currentTarget.files ?? [])];
                event.currentTarget.value = "";
                void add(files);
              }}
            />
          </label>
        )}
        <span class="hint">Enter sends, Shift+Enter is a new line</span>
        {isBusy ? (
          <button type="button" class="stop" id="stop" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" id="send" disabled={!isReady}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}
