"""Images offline: `LLM.chat`, `LLM.generate`, sessions, and the commands on the terminal."""

from __future__ import annotations

import asyncio
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.cli.main import main
from quire.errors import MediaError, ValidationError
from tests.media.files import data_url, encoded, noise
from tests.media.seeing_model import IMAGE, TEXT_TEMPLATE
from tests.media.test_server import Reference, asked, text_part

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZE = (40, 24)


@pytest.fixture
def make_seeing(make_llm: Callable[..., LLM], seeing_model: Path) -> Callable[..., LLM]:
    return lambda **settings: make_llm(seeing_model, **settings)


def test_every_form_gives_the_answer_of_transformers(
    make_seeing: Callable[..., LLM], seeing_model: Path, tmp_path: Path
) -> None:
    llm, image = make_seeing(), noise(*SIZE, seed=1)
    wanted = Reference(seeing_model).answer(asked({"type": "image"}, text_part("what?")), [image], 6)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(image))
    parts: list[dict[str, Any]] = [
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": image},
        {"type": "image", "image": path},
        {"type": "image", "image": np.asarray(image)},
        {"type": "image_url", "image_url": {"url": data_url(encoded(image))}},
    ]
    talks = [asked(part, text_part("what?")) for part in parts]
    for output in llm.chat(talks, GREEDY, use_tqdm=False):
        assert list(output.outputs[0].token_ids) == wanted
    text = "<|user|><|vision_start|><|image_pad|><|vision_end|>what?</s><|assistant|>"
    tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
    for prompt in (
        {"prompt_token_ids": tokens, "multi_modal_data": {"image": image}},
        {"prompt_token_ids": tokens, "multi_modal_data": {"image": [image]}, "multi_modal_uuids": {"image": ["x"]}},
        {"prompt": text, "prompt_token_ids": tokens, "multi_modal_data": {"image": path}},
    ):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        assert list(output.outputs[0].token_ids) == wanted
    assert output.num_cached_tokens and output.num_cached_tokens >= 16


def test_a_template_that_takes_text_gets_the_placeholder(make_seeing: Callable[..., LLM]) -> None:
    llm = make_seeing(chat_template=TEXT_TEMPLATE)
    (output,) = llm.chat(asked({"type": "image_pil", "image_pil": noise(*SIZE)}, text_part("what?")), GREEDY,
                         use_tqdm=False)  # fmt: skip
    assert output.prompt_token_ids.count(IMAGE) == 15 and output.prompt is not None
    assert "<|image_pad|>\nwhat?" in output.prompt


def test_what_is_refused(make_seeing: Callable[..., LLM], make_llm: Callable[..., LLM]) -> None:
    llm, part = make_seeing(limit_mm_per_prompt={"image": 1}), {"type": "image_pil", "image_pil": noise(*SIZE)}
    for given, says in (
        ({"prompt": "a", "multi_modal_data": {"image": noise(*SIZE)}}, "0 placeholders"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"audio": 1}}, "it takes image and video"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": 7}, "an object such as"),
        ({"prompt": "<|image_pad|>"}, "stands for an image"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": [noise(9, 9)] * 2}}, "at most 1"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": "cat.png"}}, "neither a data URL"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": noise(9, 9)}, "suffix": "b"}, "no suffix"),
    ):
        with pytest.raises(ValidationError, match=says):
            llm.generate(given, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="images are for generation"):
        llm.embed({"prompt": "<|image_pad|>", "multi_modal_data": {"image": noise(9, 9)}}, use_tqdm=False)
    with pytest.raises(MediaError, match="takes text parts only"):
        make_llm().chat(asked(part), GREEDY, use_tqdm=False)
    with pytest.raises(MediaError, match="takes text parts only"):
        make_seeing(vision="off").chat(asked(part), GREEDY, use_tqdm=False)


def test_sessions_remember_their_images(make_seeing: Callable[..., LLM]) -> None:
    llm, image = make_seeing(), noise(64, 48, seed=3)
    talk = asked({"type": "image_pil", "image_pil": image}, text_part("what is in the picture?"))
    (plain,) = llm.chat(talk, GREEDY, use_tqdm=False)
    session = llm.sessions.create("seen", messages=talk)
    assert session.generate(GREEDY).outputs[0].token_ids == plain.outputs[0].token_ids
    session.append([{"role": "user", "content": "and what else?"}])
    second = session.generate(GREEDY)
    assert second.prompt_token_ids.count(IMAGE) == 48 and (second.num_cached_tokens or 0) >= 48
    llm.sessions.delete("seen")


def test_async(seeing_model: Path) -> None:
    asyncio.run(asyncio.wait_for(generate_async(seeing_model), 60))


async def generate_async(seeing_model: Path) -> None:
    prompt: Any = {
        "prompt": "<|user|><|image_pad|>what?<|assistant|>",
        "multi_modal_data": {"image": data_url(encoded(noise(*SIZE)))},
    }
    async with AsyncLLM(seeing_model, dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        async for output in llm.generate(prompt, GREEDY):
            last = output
        assert last.finished and last.prompt_token_ids.count(IMAGE) == 15
        with pytest.raises(MediaError, match="base64"):
            async for _ in llm.generate({**prompt, "multi_modal_data": {"image": "data:image/png;base64,!"}}, GREEDY):
                pass


def test_boxes_through_structured_output(
    seeing_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("bounding_boxes")
    image = example.drawing()
    boxes = example.main(model=str(seeing_model), dtype="float32", num_gpu_blocks_override=64, device="cpu")
    for one in boxes:
        assert all(0 <= place <= most for place, most in zip(one["box"], image.size * 2, strict=True))
    assert "boxes in an image of 224 × 168" in capsys.readouterr().out
    sys.modules.pop("bounding_boxes")


class TestCommands:
    FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--temperature", "0", "--max-tokens", "4")

    @pytest.fixture
    def picture(self, tmp_path: Path) -> Path:
        (tmp_path / "a.png").write_bytes(encoded(noise(*SIZE, seed=1)))
        return tmp_path / "a.png"

    def test_generate_and_chat_give_the_same_answer(
        self,
        seeing_model: Path,
        picture: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert main(["generate", "what?", "--chat", "--image", str(picture), "--model", str(seeing_model),
                     *self.FLAGS]) == 0  # fmt: skip
        made = capsys.readouterr().out.strip()
        asking = f"/image {picture.parent}/none.png\n/image {picture}\nwhat?\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(asking))
        assert main(["chat", str(seeing_model), *self.FLAGS]) == 2  # the first command failed
        shown = capsys.readouterr()
        assert made and shown.out.strip() == made
        assert "the next question has 1 image" in shown.err and "none.png' cannot be read" in shown.err

    def test_benchmarks(self, seeing_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        few = ("--model", str(seeing_model), "--input-len", "8", "--output-len", "2", "--image-size", "40x24")
        assert main(["bench", "throughput", *few, "--num-prompts", "3", "--images", "2", *self.FLAGS[:4]]) == 0
        assert "images/s of 40 × 24" in capsys.readouterr().out
