// Images for the model: read in this browser, and made smaller where they are large.

const LONGEST_SIDE = 2048;
const LARGEST_FILE = 4 * 1024 * 1024;
/** Types that are sent as they are; others are converted. */
const SENT = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** The files of a paste or a drop. */
export function filesOf(transfer: DataTransfer | null): File[] {
  return transfer ? [...transfer.files] : [];
}

/** Width and height of what is sent of an image. */
export function fit(width: number, height: number): [number, number] {
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height, 1));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

/** The image as a data: address; raises if it is none. */
export async function readImage(file: File): Promise<string> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This file"} is not an image that this browser can read`);
  }
  const [width, height] = fit(bitmap.width, bitmap.height);
  if (SENT.includes(file.type) && file.size <= LARGEST_FILE && width === bitmap.width) return dataUrl(file);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d")!;
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return dataUrl(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 }));
}

function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error ?? new Error("the image cannot be read"));
    reader.readAsDataURL(blob);
  });
}
