"""Ask a model that sees for boxes around objects. Structured output makes the answer JSON of the right form.

    python examples/bounding_boxes.py [MODEL] [IMAGE]

MODEL is a folder or Hub id of a model that takes images; without IMAGE, a drawing is made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
MOST_BOXES = 4


def drawing() -> Image.Image:
    """A red square and a blue disc."""
    image = Image.new("RGB", (224, 168), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 30, 90, 100), fill="red")
    draw.ellipse((130, 60, 200, 130), fill="blue")
    return image


def schema(width: int, height: int) -> dict[str, object]:
    """A list of boxes within the image: left, top, right, bottom."""
    sides = [{"type": "integer", "minimum": 0, "maximum": most} for most in (width, height, width, height)]
    box = {
        "type": "object",
        "properties": {
            "label": {"type": "string", "pattern": "^[a-z ]{1,12}$"},
            "box": {"type": "array", "prefixItems": sides, "minItems": 4, "maxItems": 4, "items": False},
        },
        "required": ["label", "box"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": box, "minItems": 1, "maxItems": MOST_BOXES}


def main(max_tokens: int = 384, image: Image.Image | None = None, **settings) -> list[dict]:
    image = drawing() if image is None else image
    form = StructuredOutputsParams(json=schema(*image.size), disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=form)
    question = "Outline every object. Answer with a JSON list of label and box (left, top, right, bottom, in pixels)."
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": question}]
    with LLM(**settings) as llm:
        (answer,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    boxes = json.loads(answer.outputs[0].text)
    for one in boxes:
        print(f"{one['label']}: {one['box']}")
    print(f"{len(boxes)} boxes in an image of {image.size[0]} × {image.size[1]}")
    return boxes


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else MODEL
    main(model=chosen, image=Image.open(Path(sys.argv[2])) if len(sys.argv) > 2 else None)
