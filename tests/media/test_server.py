"""Images through every API of a real server, with the clients that people have."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from PIL import Image

from tests.media.files import data_url, encoded, gif, noise, png_header
from tests.media.seeing_model import IMAGE, VIDEO, seeing_tokenizer
from tests.server.conftest import MODEL, Live

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SIZE = (40, 24)
"""An image of 5 × 3 tokens."""
TOKENS = 15
FIXED: dict[str, Any] = {"model": MODEL, "temperature": 0}


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(image)), "detail": "high"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def chat(live: Live, messages: Any, **fields: Any) -> dict[str, Any]:
    answer = live.post(CHAT, {**FIXED, "messages": messages, "max_tokens": 6, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Reference:
    """transformers' own model and image processor."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.tokenizer = seeing_tokenizer()

    def answer(self, messages: list[dict[str, Any]], images: list[Image.Image], count: int) -> list[int]:
        """The greedy answer to a conversation whose image parts are `{"type": "image"}`."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pixels = self.processor(images, return_tensors="pt")
        for grid in pixels["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<|later|>" * (int(grid.prod()) // 4), 1)
        text = text.replace("<|later|>", "<|image_pad|>")
        tokens = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        made = []
        with torch.no_grad():
            for _ in range(count):
                kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
                logits = self.model(input_ids=tokens, mm_token_type_ids=kinds, **pixels).logits
                made.append(int(logits[0, -1].argmax()))
                tokens = torch.cat([tokens, torch.tensor([[made[-1]]])], 1)
        return made


@pytest.fixture(scope="module")
def reference(seeing_model: Path) -> Reference:
    return Reference(seeing_model)


class TestChat:
    def test_answers_are_those_of_transformers(self, seeing: Live, reference: Reference) -> None:
        first, second = noise(*SIZE, seed=1), noise(64, 33, seed=2)
        one = chat(seeing, asked(image_part(first), text_part("what?")), return_token_ids=True)
        assert one["choices"][0]["token_ids"] == reference.answer(
            asked({"type": "image"}, text_part("what?")), [first], 6
        )
        two = chat(seeing, asked(text_part("a "), image_part(second), text_part(" b "), image_part(first)),
                   return_token_ids=True)  # fmt: skip
        placed = asked(text_part("a "), {"type": "image"}, text_part(" b "), {"type": "image"})
        assert two["choices"][0]["token_ids"] == reference.answer(placed, [second, first], 6)

    def test_usage_counts_the_tokens_of_images(self, seeing: Live) -> None:
        image = noise(*SIZE, seed=3)
        text = chat(seeing, asked(text_part("what?")))["usage"]
        seen = chat(seeing, asked(image_part(image), text_part("what?")))["usage"]
        assert seen["prompt_tokens"] == text["prompt_tokens"] + TOKENS + 2  # and the two tokens around it
        assert seen["prompt_tokens_details"]["image_tokens"] == TOKENS
        assert "image_tokens" not in text["prompt_tokens_details"]
        counted = seeing.post("/tokenize", {"messages": asked(image_part(image), text_part("what?"))}).json()
        assert counted["count"] == seen["prompt_tokens"] and counted["tokens"].count(IMAGE) == TOKENS

    def test_every_spelling_is_the_same_image(self, seeing: Live, media_folder: Path) -> None:
        image = noise(*SIZE, seed=4)
        url = data_url(encoded(image))
        (media_folder / "a.png").write_bytes(encoded(image))
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url, "detail": "low"},
            {"type": "image", "image": url},
            {"type": "image", "base64": base64.b64encode(encoded(image)).decode()},
            {"image_url": url},
            {"type": "image_url", "image_url": {"url": url}, "uuid": "a name that identifies nothing"},
            {"type": "image_url", "image_url": {"url": f"file://{media_folder}/a.png"}},
            {"type": "image", "path": f"{media_folder}/a.png"},
            {"type": "image_url", "image_url": {"url": data_url(encoded(image, "BMP"), "image/bmp")}},
        ]
        texts = {json.dumps(chat(seeing, asked(part, text_part("?")))["choices"][0]["message"]) for part in parts}
        assert len(texts) == 1
        other = chat(seeing, asked(image_part(noise(*SIZE, seed=5)), text_part("?")))
        assert json.dumps(other["choices"][0]["message"]) not in texts

    def test_one_pixel_makes_another_image(self, seeing: Live) -> None:
        image = noise(*SIZE, seed=6)
        changed = image.copy()
        changed.putpixel((7, 7), (0, 0, 0))
        question = text_part("how many birds are there in this picture of the world?")
        first, same, other = (
            chat(seeing, asked(image_part(one), question))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for one in (image, image, changed)
        )
        assert first == 0 and same >= 48 and other == 0

    def test_a_follow_up_encodes_nothing(self, seeing: Live) -> None:
        image = noise(64, 48, seed=7)
        before = encodings(seeing)
        talk = asked(image_part(image), text_part("what is in the picture?"))
        first = chat(seeing, talk)
        assert encodings(seeing) == before + 1
        talk += [first["choices"][0]["message"], {"role": "user", "content": "and what else?"}]
        second = chat(seeing, talk)
        assert encodings(seeing) == before + 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48

    def test_streaming_with_the_openai_client(self, seeing: Live) -> None:
        image = noise(*SIZE, seed=8)
        with seeing.openai() as client:
            stream = client.chat.completions.create(
                model=MODEL, messages=asked(image_part(image), text_part("what?")), max_tokens=6, temperature=0,
                stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            chunks = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        whole = chat(seeing, asked(image_part(image), text_part("what?")))
        assert text == whole["choices"][0]["message"]["content"]
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == whole["usage"]["prompt_tokens"]

    def test_an_animation_as_a_video(self, seeing: Live) -> None:
        frames = [noise(32, 32, seed) for seed in range(4)]
        data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
        part = {"type": "video_url", "video_url": {"url": data_url(data, "image/webp")}}
        seen = chat(seeing, asked(part, text_part("what happens?")), return_token_ids=True)
        assert seen["usage"]["prompt_tokens_details"]["image_tokens"] == seen["prompt_token_ids"].count(VIDEO) > 0


def encodings(live: Live) -> float:
    """Images that the engine has encoded so far."""
    return sum(value for name, value in live.engine_metrics().items() if name == "quire:encoded_items")


class TestSessions:
    def test_a_session_of_a_chat_never_keeps_another_image(self, seeing: Live) -> None:
        first, other = noise(64, 48, seed=20), noise(64, 48, seed=21)
        question = text_part("what is in the picture?")
        plain = [chat(seeing, asked(image_part(one), question), cache_salt="a") for one in (first, other)]
        for one, wanted in ((first, plain[0]), (other, plain[1]), (other, plain[1]), (first, plain[0])):
            made = chat(seeing, asked(image_part(one), question), session_id="pictures")
            assert made["choices"][0]["message"] == wanted["choices"][0]["message"]
        talk = asked(image_part(first), question)
        talk += [plain[0]["choices"][0]["message"], {"role": "user", "content": "and what else?"}]
        wanted = chat(seeing, talk, cache_salt="b")
        before = encodings(seeing)
        assert chat(seeing, talk, session_id="pictures")["choices"] == wanted["choices"]
        assert encodings(seeing) == before
        assert seeing.client.delete("/v1/sessions/pictures").status_code == 200

    def test_a_session_of_turns_remembers_its_images(self, seeing: Live) -> None:
        first, second = noise(64, 48, seed=22), noise(40, 48, seed=23)
        asks = asked(image_part(first), text_part("what is in the picture?"))
        body: dict[str, Any] = {**FIXED, "max_tokens": 5, "ignore_eos": True}
        assert seeing.post("/v1/sessions", {"id": "seen", "input": asks}).status_code == 200
        path = "/v1/sessions/seen/generate"
        plain = chat(seeing, asks, max_tokens=5, cache_salt="c")  # a salt has an encoder's cache of its own
        before = encodings(seeing)
        one = seeing.post(path, body).json()
        assert one["choices"][0]["text"] == plain["choices"][0]["message"]["content"]
        assert encodings(seeing) == before + 1
        more = [{"role": "user", "content": "and what else?"}]
        two = seeing.post(path, {**body, "input": more, "return_token_ids": True})
        assert two.status_code == 200 and encodings(seeing) == before + 1, two.text
        assert two.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
        other = asked(image_part(second), text_part("this one?"))
        three = seeing.post(path, {**body, "input": other, "return_token_ids": True})
        assert three.status_code == 200 and encodings(seeing) == before + 2, three.text
        assert three.json()["prompt_token_ids"].count(IMAGE) == 8 * 6 + 5 * 6
        assert seeing.client.delete("/v1/sessions/seen").status_code == 200


class TestOtherApis:
    def test_responses_and_their_follow_ups(self, seeing: Live) -> None:
        image = noise(64, 48, seed=10)
        part = {"type": "input_image", "image_url": data_url(encoded(image)), "detail": "auto"}
        before = encodings(seeing)
        with seeing.openai() as client:
            first = client.responses.create(
                model=MODEL, temperature=0, max_output_tokens=6,
                input=[{"role": "user", "content": [part, {"type": "input_text", "text": "what is this picture?"}]}],
            )  # fmt: skip
            assert first.usage is not None and encodings(seeing) == before + 1
            second = client.responses.create(
                model=MODEL, temperature=0, max_output_tokens=6, input="and what else?", previous_response_id=first.id
            )
            assert second.usage is not None and second.usage.input_tokens_details.cached_tokens >= 48
            assert encodings(seeing) == before + 1
            items = client.responses.input_items.list(second.id)
            assert "input_image" in items.to_json()
        whole = chat(
            seeing, asked(image_part(image), text_part("what is this picture?")), max_tokens=6, ignore_eos=False
        )
        assert first.output_text == whole["choices"][0]["message"]["content"]

    def test_anthropics_client(self, seeing: Live) -> None:
        image = noise(*SIZE, seed=11)
        data = base64.b64encode(encoded(image)).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
            greedy: Any = {"model": MODEL, "max_tokens": 6, "extra_body": {"temperature": 0}}
            made = client.messages.create(messages=[{"role": "user", "content": content}], **greedy)
            counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": content}])
            with client.messages.stream(messages=[{"role": "user", "content": content}], **greedy) as stream:
                streamed = stream.get_final_text()
        whole = chat(seeing, asked(image_part(image), text_part("what?")), ignore_eos=False)
        assert made.content[0].text == streamed == whole["choices"][0]["message"]["content"]
        used = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
        assert used == counted.input_tokens == whole["usage"]["prompt_tokens"]

    def test_models_say_what_they_read(self, seeing: Live) -> None:
        card = seeing.client.get("/v1/models").json()["data"][0]
        assert card["modalities"] == ["text", "image", "video"]


def refused(live: Live, part: dict[str, Any], says: str, status: int = 400) -> dict[str, Any]:
    answer = live.post(CHAT, {**FIXED, "messages": asked(part, text_part("?")), "max_tokens": 1})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert says in error["message"], error
    return error


def by_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


class TestRefused:
    @pytest.mark.parametrize(
        "data, says",
        [
            (png_header(50_000, 50_000), "pixels; at most 1000000"),
            (encoded(noise(60, 60))[:500], "cannot be decoded"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
            (b"%PDF-1.4", "PDF"),
            (b"", "empty"),
            (bytes(1_200_000), "at most 1048576 (--max-image-bytes)"),
        ],
    )
    def test_files_that_are_no_image(self, seeing: Live, data: bytes, says: str) -> None:
        assert refused(seeing, by_url(data_url(data)), says)["param"] == "messages[0].content[0]"

    @pytest.mark.parametrize(
        "url, says",
        [
            ("https://169.254.169.254/latest/meta-data", "not public"),
            ("https://localhost/a.png", "not public"),
            ("https://[::1]/a.png", "not public"),
            ("https://2130706433/a.png", "not public"),
            ("http://images.example.com/a.png", "only https"),
            ("file:///etc/passwd", "allowed folder"),
            ("/etc/passwd", "allowed folder"),
            ("ftp://example.com/a", "scheme"),
            ("data:image/png;base64,????", "base64"),
            (7, "a int"),
            (None, "has no url"),
        ],
    )
    def test_urls(self, seeing: Live, url: Any, says: str) -> None:
        refused(seeing, by_url(url), says)

    def test_counts_and_kinds(self, seeing: Live) -> None:
        part = image_part(noise(8, 8))
        answer = seeing.post(CHAT, {**FIXED, "messages": asked(*[part] * 5), "max_tokens": 1})
        assert answer.status_code == 400 and "at most 4 (limit_mm_per_prompt)" in answer.json()["error"]["message"]
        animation = {"type": "video_url", "video_url": {"url": data_url(gif(300), "image/gif")}}
        refused(seeing, animation, "more than 256 frames")
        refused(seeing, {"type": "video_url", "video_url": {"url": "data:video/avi;base64,AAAA"}}, "video/avi")
        refused(seeing, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio")
        refused(seeing, {"type": "input_image", "file_id": "file-1"}, "file_id")

    def test_placeholders_without_images(self, seeing: Live) -> None:
        answer = seeing.post(CHAT, {**FIXED, "messages": [{"role": "user", "content": "<|image_pad|>"}]})
        assert answer.status_code == 400 and "stands for an image" in answer.json()["error"]["message"]
        refused_text = asked(image_part(noise(8, 8)), text_part("<|image_pad|>"))
        answer = seeing.post(CHAT, {**FIXED, "messages": refused_text})
        assert answer.status_code == 400 and "2 placeholders" in answer.json()["error"]["message"]

    def test_settings_of_the_processor_are_not_trusted(self, seeing: Live) -> None:
        body = {**FIXED, "messages": asked(image_part(noise(8, 8))), "mm_processor_kwargs": {"max_pixels": 10**9}}
        answer = seeing.post(CHAT, body)
        assert answer.status_code == 400 and "--trust-request-mm-kwargs" in answer.json()["error"]["message"]

    def test_images_of_more_tokens_than_the_model_reads(self, seeing: Live) -> None:
        parts = [image_part(noise(200, 200, seed)) for seed in range(4)]
        body = {**FIXED, "messages": asked(*parts, text_part("x" * 400)), "max_tokens": 1}
        answer = seeing.post(CHAT, body)
        assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]["message"]

    def test_other_apis_refuse_alike(self, seeing: Live) -> None:
        bomb = data_url(png_header(50_000, 50_000))
        item = {"role": "user", "content": [{"type": "input_image", "image_url": bomb}]}
        answer = seeing.post(RESPONSES, {"model": MODEL, "input": [item]})
        assert answer.status_code == 400 and "pixels; at most" in answer.text
        source = {"type": "url", "url": "https://169.254.169.254/"}
        message = {"role": "user", "content": [{"type": "image", "source": source}]}
        answer = seeing.post(MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": [message]})
        assert answer.status_code == 400 and "not public" in answer.text

    def test_a_model_of_text_names_itself(self, live: Live) -> None:
        refused(live, image_part(noise(8, 8)), "takes text parts only")
        assert live.client.get("/v1/models").json()["data"][0]["modalities"] == ["text"]
        with live.openai() as client, pytest.raises(openai.BadRequestError, match="is an image; the model"):
            client.chat.completions.create(model=MODEL, messages=asked(image_part(noise(8, 8))))


def test_bodies_have_room_for_configured_images(seeing: Live) -> None:
    assert seeing.server.limits.max_body == (8 << 20) + 2 * (1 << 20) * 4 // 3
    image = Image.open(io.BytesIO(encoded(noise(500, 500))))
    assert chat(seeing, asked(image_part(image), text_part("?")), max_tokens=1)["usage"]["prompt_tokens"] > 60
