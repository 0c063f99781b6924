"""Decoding images: as transformers does, and never more than the limits allow."""

from __future__ import annotations

import base64
import io
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from quire.errors import MediaError
from quire.media.decoding import DecodeMemory
from quire.media.limits import BYTES_A_PIXEL, MediaLimits
from quire.media.loading import MediaLoader, MediaSource
from tests.media.files import data_url, encoded, gif, noise, peak_memory, png_header

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def loader(**limits: Any) -> MediaLoader:
    return MediaLoader(MediaLimits(**limits))


def video(content: Any, **limits: Any) -> list[Image.Image]:
    with loader(**limits).decoded([MediaSource("video", content)]) as made:
        return made.videos[0]


def refused(content: Any, says: str, kind: Any = "image", **limits: Any) -> MediaError:
    with pytest.raises(MediaError, match=says) as caught, loader(**limits).decoded([MediaSource(kind, content)]):
        pass
    return caught.value


def same(ours: Image.Image, theirs: Image.Image) -> bool:
    return ours.mode == theirs.mode == "RGB" and np.array_equal(np.asarray(ours), np.asarray(theirs))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(12, 8), "JPEG", exif=exif)


def palette() -> bytes:
    image = noise(16, 9).quantize(16)
    image.info["transparency"] = 3
    return encoded(image, "PNG", transparency=3)


def deep() -> bytes:
    return encoded(Image.fromarray(np.arange(0, 65000, 65000 // 60, dtype=np.uint16)[:60].reshape(6, 10)))


def alpha(form: str) -> bytes:
    image = noise(10, 7).convert("RGBA")
    image.putalpha(Image.fromarray(np.arange(70, dtype=np.uint8).reshape(7, 10) * 3))
    return encoded(image, form, **({"lossless": True} if form == "WEBP" else {}))


FILES = {
    "png": encoded(noise(17, 11)),
    "jpeg": encoded(noise(17, 11), "JPEG"),
    "progressive": encoded(noise(40, 30), "JPEG", progressive=True),
    "webp": encoded(noise(17, 11), "WEBP"),
    "gif": encoded(noise(17, 11).quantize(8), "GIF"),
    "bmp": encoded(noise(17, 11), "BMP"),
    "cmyk": encoded(noise(17, 11).convert("CMYK"), "JPEG"),
    "grey": encoded(noise(17, 11).convert("L")),
    "grey and alpha": encoded(noise(17, 11).convert("LA")),
    "two colours": encoded(noise(17, 11).convert("1")),
    "alpha": alpha("PNG"),
    "alpha in webp": alpha("WEBP"),
    "palette": palette(),
    "16 bits": deep(),
    "animation": encoded(noise(9, 9, 1), "GIF", save_all=True, append_images=[noise(9, 9, 2)]),
    **{f"orientation {number}": turned(number) for number in range(1, 9)},
}


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", list(FILES))
    def test_pixels_are_those_of_transformers(self, name: str, tmp_path: Path) -> None:
        data = FILES[name]
        path = tmp_path / "image"
        path.write_bytes(data)
        theirs = load_image(str(path))
        for content in (data, data_url(data), path, bytearray(data)):
            assert same(loader().load_image(content), theirs)

    def test_objects_of_the_program_itself(self) -> None:
        image = noise(20, 10)
        assert same(loader().load_image(image), image)
        assert same(loader().load_image(np.asarray(image)), image)
        assert same(loader().load_image(image.convert("RGBA")), load_image(image.convert("RGBA")))
        refused(np.zeros((3, 4, 4), np.float32), "uint8")
        refused(7, "a int; it must be")


class TestRefused:
    def test_bombs_before_they_are_decoded(self) -> None:
        with peak_memory() as grown:
            refused(png_header(50_000, 50_000), "pixels; at most 50000000")
            refused(png_header(10_000, 10_000), "10000 × 10000 pixels; at most 50000000")
            refused(png_header(60_000, 2_000), "60000 × 2000")
            bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0)
            refused(bmp, "pixels; at most")
            refused(gif(1, size=65_000), "pixels; at most")
            jpeg = FILES["jpeg"]
            at = jpeg.index(b"\xff\xc0") + 5
            refused(jpeg[:at] + struct.pack(">HH", 60_000, 60_000) + jpeg[at + 4 :], "pixels; at most")
            assert grown() < 32 << 20

    def test_a_frame_that_is_larger_than_the_header_says(self) -> None:
        whole = bytearray(gif(2, size=4))
        at = whole.index(b"\x2c", whole.index(b"\x2c") + 1)
        whole[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
        refused(bytes(whole), "larger than its header|cannot be decoded|pixels", "video")

    @pytest.mark.parametrize("name", ["png", "jpeg", "webp", "gif", "bmp", "progressive"])
    @pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
    def test_files_that_are_cut_off(self, name: str, share: float) -> None:
        data = FILES[name]
        refused(data[: int(len(data) * share)], "cannot be decoded|damaged|unknown type|empty")

    def test_damaged_files_never_raise_anything_else(self) -> None:
        random = np.random.default_rng(7)
        for name in ("png", "jpeg", "webp", "gif", "bmp", "orientation 6", "palette"):
            data = np.frombuffer(FILES[name], np.uint8)
            for _ in range(40):
                broken = data.copy()
                places = random.integers(0, len(data), 6)
                broken[places] = random.integers(0, 256, 6)
                try:
                    made = loader(max_pixels=100_000).load_image(broken.tobytes())
                except MediaError:
                    continue
                assert made.mode == "RGB" and made.size[0] * made.size[1] <= 100_000

    @pytest.mark.parametrize(
        "data, says",
        [
            (SVG, "an SVG"), (b"<?xml version='1.0'?>" + SVG, "an SVG"), (b"<!doctype html><p>", "web page"),
            (b"%PDF-1.7 ...", "PDF"), (b"II*\0" + bytes(99), "TIFF"), (b"\0\0\0\x20ftypavif" + bytes(99), "AVIF"),
            (b"\0\0\0\x20ftypheic" + bytes(99), "HEIC"), (b"", "empty"), (b"hello", "unknown type"),
            (b"8BPS" + bytes(99), "PSD"), (b"%!PS-Adobe-3.0 EPSF", "unknown type"), (bytes(99), "unknown type"),
        ],
    )  # fmt: skip
    def test_other_types_are_refused_by_name(self, data: bytes, says: str) -> None:
        assert refused(data, says).reason == "type"
        refused(data_url(data, "image/png"), says)

    @pytest.mark.parametrize("form", ["TIFF", "PPM", "TGA", "ICO", "PCX"])
    def test_types_that_pillow_reads_and_quire_does_not(self, form: str) -> None:
        refused(encoded(noise(16, 16), form), "images are PNG, JPEG, WebP, GIF or BMP")

    @pytest.mark.parametrize(
        "url, says",
        [
            ("data:image/svg+xml;base64,PHN2Zy8+", "an SVG"),
            ("data:text/html;base64,AAAA", "'text/html', which is no image"),
            ("data:image/png,raw", "not in base64"),
            ("data:image/png;base64", "without a comma"),
            ("data:image/png;base64,!!!!", "base64 is not valid"),
            ("data:image/png;base64,A", "base64 is not valid"),
            ("javascript:alert(1)", "scheme 'javascript'"),
            ("ftp://a/b", "scheme 'ftp'"),
            ("https://images.example.com/a.png", "--allowed-media-hosts"),
            ("http://127.0.0.1/a.png", "--allowed-media-hosts"),
            ("cat.png", "neither a data URL"),
            ("/etc/passwd", "neither a data URL"),
            ("file:///etc/passwd", "--allowed-local-media-path"),
            ("", "neither a data URL"),
        ],
    )
    def test_urls_that_are_no_image(self, url: str, says: str) -> None:
        refused(url, says)

    def test_base64_is_bounded_before_it_is_decoded(self) -> None:
        with peak_memory() as grown:
            text = "data:image/png;base64," + "A" * (40 << 20)
            before = grown()
            refused(text, "at most 20971520 ")
            assert grown() - before < 16 << 20

    def test_base64_in_lines_or_without_padding_is_read(self) -> None:
        text = base64.encodebytes(FILES["png"]).decode()
        assert same(
            loader().load_image("data:image/png;base64," + text), load_image(Image.open(io.BytesIO(FILES["png"])))
        )
        assert loader().load_image("data:image/png;base64," + text.strip().rstrip("=")).size == (17, 11)

    def test_bytes_and_pixels_of_a_request_are_bounded(self) -> None:
        refused(FILES["png"], "bytes; at most 100 ", max_bytes=100)
        sources = [MediaSource("image", FILES["png"])] * 5
        assert len(sources) * 17 * 11 > 4 * 200
        with (
            pytest.raises(MediaError, match="5 images and frames have 935 pixels together"),
            loader(max_pixels=200).decoded(sources),
        ):
            pass


class TestVideos:
    def test_lists_of_frames_and_animations(self) -> None:
        frames = [noise(8, 6, seed) for seed in range(4)]
        webp = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
        joined = "data:video/jpeg;base64," + ",".join(
            base64.b64encode(encoded(frame, "JPEG")).decode() for frame in frames
        )
        for content in (frames, np.stack([np.asarray(frame) for frame in frames]), webp, data_url(webp, "image/webp")):
            made = video(content)
            assert [same(*pair) for pair in zip(made, frames, strict=True)] == [True] * 4
        assert [frame.size for frame in video(joined)] == [(8, 6)] * 4

    def test_an_animated_gif_is_a_video_and_its_first_frame_an_image(self) -> None:
        frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
        assert [frame.getpixel((0, 0)) for frame in video(data)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
        assert loader().load_image(data).getpixel((0, 0)) == (255, 0, 0)

    def test_ten_thousand_frames(self) -> None:
        data = gif(10_000)
        begin = time.process_time()
        with peak_memory() as grown:
            refused(data, "more than 256 frames", "video")
            refused(gif(200, size=2000), "pixels together", "video")
            assert loader().load_image(data).size == (1, 1)
            assert grown() < 32 << 20
        assert time.process_time() - begin < 5
        refused([noise(2, 2)] * 257, "more than 256 frames", "video")
        refused([], "no frames", "video")
        refused("data:video/jpeg;base64," + "," * 300, "more than 256 frames", "video")

    @pytest.mark.parametrize(
        "content, says",
        [
            ("data:video/mp4;base64,AAAA", "video/mp4"),
            ("data:video/webm;base64,AAAA", "video/webm"),
            (b"\0\0\0\x20ftypisom" + bytes(99), "MP4"),
            (b"\x1a\x45\xdf\xa3" + bytes(99), "WebM"),
        ],
    )
    def test_containers_are_refused_by_name(self, content: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.media.loading.has_decoder", lambda: False)
        refused(content, f"{says}.*animated GIF", "video")


class TestLocalFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "media" / "inner").mkdir(parents=True)
        (tmp_path / "media" / "inner" / "cat and dog.png").write_bytes(FILES["png"])
        (tmp_path / "secret.png").write_bytes(FILES["png"])
        (tmp_path / "media-other").mkdir()
        (tmp_path / "media-other" / "a.png").write_bytes(FILES["png"])
        (tmp_path / "media" / "out.png").symlink_to(tmp_path / "secret.png")
        (tmp_path / "media" / "up").symlink_to(tmp_path)
        (tmp_path / "media" / "in.png").symlink_to(tmp_path / "media" / "inner" / "cat and dog.png")
        return tmp_path / "media"

    def test_files_below_the_allowed_folder(self, folder: Path) -> None:
        reader = loader(local_path=str(folder))
        for name in (
            f"file://{folder}/inner/cat%20and%20dog.png", f"file://localhost{folder}/inner/cat and dog.png",
            f"{folder}/inner/cat and dog.png", "inner/cat and dog.png", f"{folder}/in.png",
        ):  # fmt: skip
            assert reader.load_image(name).size == (17, 11)

    @pytest.mark.parametrize(
        "name",
        [
            "{}/../secret.png", "file://{}/../secret.png", "file://{}/%2e%2e/secret.png", "{}/out.png",
            "{}/up/secret.png", "../secret.png", "{}-other/a.png", "/etc/hostname", "{}/none.png", "{}", "file://{}/a%00b",
            "file://example.com{}/inner/cat and dog.png", "{}/inner/" + "a" * 300,
        ],
    )  # fmt: skip
    def test_nothing_else(self, folder: Path, name: str) -> None:
        with pytest.raises(MediaError, match="allowed folder|not a file|no host|NUL|cannot be read"):
            loader(local_path=str(folder)).load_image(name.format(folder))

    def test_a_pipe_does_not_block(self, folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        with pytest.raises(MediaError, match="not a file"):
            loader(local_path=str(folder)).load_image(f"{folder}/pipe")

    def test_objects_of_the_program_itself_need_no_permission(self, folder: Path) -> None:
        assert loader().load_image(folder / "inner" / "cat and dog.png").size == (17, 11)
        with pytest.raises(MediaError, match="cannot be read: No such file"):
            loader().load_image(folder / "none.png")


class TestMemory:
    def test_images_wait_for_memory_and_any_fits_alone(self) -> None:
        memory = DecodeMemory(100 * BYTES_A_PIXEL)
        order = []
        with memory.hold(1000):
            assert memory.held == 1000 * BYTES_A_PIXEL

            def work() -> None:
                with memory.hold(50):
                    order.append("second")

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(0.05)
            order.append("first")
        thread.join(10)
        assert order == ["first", "second"] and memory.held == 0

    def test_waiting_ends_when_the_result_is_not_wanted(self) -> None:
        class UnwantedError(Exception):
            pass

        def check() -> None:
            raise UnwantedError

        memory = DecodeMemory(BYTES_A_PIXEL)
        with memory.hold(1), pytest.raises(UnwantedError), memory.hold(1, check):
            pass
        assert memory.held == 0

    def test_memory_is_free_after_errors(self) -> None:
        reader = loader()
        for data in (FILES["png"], FILES["png"][:80], png_header(50_000, 50_000)):
            with pytest.raises((MediaError, ZeroDivisionError)), reader.decoded([MediaSource("image", data)]):
                raise ZeroDivisionError
        assert reader.memory.held == 0
