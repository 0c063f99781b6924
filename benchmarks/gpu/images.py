"""Images on a GPU: the encoder of Qwen2.5-VL-7B alone, and an engine with images, on random weights.

    python -m benchmarks.gpu.images [--parts encoder attention profile engine first gaps] [--ways flash triton] [--tiny]

`encoder`    images of 1,024 x 1,024 pixels in batches of 1, 4 and 8: ms, TFLOP/s (counted from the shapes, without
             padding) and ms that the host spends on launching, for each way to compute attention in whole pictures and
             in windows; whether all ways agree
`attention`  one layer's attention, whole and in windows, by way and by tile of our kernel: us and TFLOP/s
`profile`    attention, products and the rest in the kernels of a batch of 4, and the slowest kernels of the rest
`graphs`     one small image in a CUDA graph and launched kernel by kernel: ms
`engine`     256 requests with one image each, all different, and 128 tokens out: images/s and tokens/s; and how many
             images a second the host prepares
`first`      ms to the first token, median of 10: text; an image of the same length that is in the encoder's cache; both
             again with their KV cached; a new image
`gaps`       p50, p99 and largest gap between tokens of 32 streams: alone, and with a new image every second, 15 s each

The first three run in this process, the rest in an engine of their own, started once. A part that fails is reported and
the others go on. The table comes last; with $OUT set, all figures are also written to $OUT/images.json. `--ways WHOLE
WINDOWS` sets how the engine's encoder attends (`quire.kernels.segments.WAYS`). `--tiny` tries all parts on a tiny model
on any device.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from quire import AsyncLLM, SamplingParams
from quire.distributed.groups import Ranks
from quire.kernels.segments import FLASH, WAYS, WHOLE, WINDOWS, Segments, attention_ways
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.build_context import BuildContext
from quire.loading.files import local_files
from quire.loading.model_config import ModelConfig, read_model_config
from quire.messages.media import MediaItem
from quire.vision.loading import make_encoder
from quire.vision.processor import processor_for

MODEL = Path(__file__).parent / "models" / "qwen2.5-vl-7b"
PARTS = ("encoder", "attention", "profile", "graphs", "engine", "first", "gaps")
TILES = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)]
"""Queries, keys, warps, stages."""
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 152064, "max_position_embeddings": 4096,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}  # fmt: skip
TINY_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 84, "num_heads": 4, "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}  # fmt: skip


class Bench:
    """Options, figures, and the table's lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_tiny = bool(options.tiny)
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.side = 168 if self.is_tiny else 1024
        self.requests, self.tokens = (8, 4) if self.is_tiny else (256, 128)
        self.streams, self.seconds = (4, 2.0) if self.is_tiny else (32, 15.0)
        self.repeats = 3 if self.is_tiny else 10
        self.figures: dict[str, Any] = {}
        self.lines: list[tuple[str, str]] = []
        self.folder = MODEL
        if self.is_tiny:
            self.folder = Path(tempfile.mkdtemp(prefix="quire-images-"))
            config = json.loads((MODEL / "config.json").read_text())
            config |= TINY
            config["vision_config"] |= TINY_VISION
            (self.folder / "config.json").write_text(json.dumps(config))
            shutil.copy(MODEL / "preprocessor_config.json", self.folder)
        self.files = local_files(str(self.folder), self.folder)
        self.config: ModelConfig = read_model_config(self.files)
        self.processor: Any = processor_for(self.config, self.folder, None)

    def add(self, name: str, value: Any, text: str) -> None:
        """A figure, and its line."""
        self.figures[name] = value
        self.lines.append((name, text))
        print(f"  {name}: {text}", flush=True)

    def guard(self, name: str, work: Callable[[], None]) -> None:
        """Run a part; the others go on if it fails."""
        if name not in self.options.parts:
            return
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            work()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            self.add(f"{name} FAILED", repr(error), repr(error)[:200])
        self.figures[f"{name}_wall_s"] = time.perf_counter() - begin
        print(f"   {name} took {time.perf_counter() - begin:.1f} s", flush=True)
        self.save()

    def save(self) -> None:
        """What is known so far."""
        if out := os.environ.get("OUT"):
            Path(out).mkdir(parents=True, exist_ok=True)
            (Path(out) / "images.json").write_text(json.dumps(self.figures, indent=1, default=str))

    # Images

    def picture(self, seed: int) -> Image.Image:
        """Noise; no other seed gives the same."""
        pixels = np.random.default_rng(seed).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def items(self, count: int) -> list[MediaItem]:
        """Prepared images."""
        token = self.config.raw["image_token_id"]
        return [self.processor.prepare([token], [self.picture(seed)]).items[0] for seed in range(count)]

    def operations(self, item: MediaItem) -> tuple[float, float]:
        """Of an image: those of products, and those of attention."""
        vision = self.config.raw["vision_config"]
        size, width, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
        patch, merge = vision["patch_size"], vision["spatial_merge_size"]
        rows, columns = (side // patch for side in item.arrays["pixels"].shape[1:3])
        patches = rows * columns
        layer = 2 * patches * (4 * size * size + 3 * size * width)
        joined = size * merge**2
        ends = 2 * patches * 3 * vision["temporal_patch_size"] * patch**2 * size
        ends += 2 * (patches // merge**2) * joined * (joined + vision["out_hidden_size"])
        windows = self.windows(rows, columns)
        full = len(vision["fullatt_block_indexes"])
        attention = 4 * size * (full * patches**2 + (depth - full) * int((windows**2).sum()))
        return float(depth * layer + ends), float(attention)

    def windows(self, rows: int, columns: int) -> np.ndarray:
        """Patches of each window."""
        vision = self.config.raw["vision_config"]
        side = vision["window_size"] // vision["patch_size"]
        heights = [min(side, rows - at) for at in range(0, rows, side)]
        widths = [min(side, columns - at) for at in range(0, columns, side)]
        return np.outer(heights, widths).reshape(-1)

    # In this process

    @functools.cached_property
    def encoder(self) -> Any:
        """Random weights."""
        ops: Any
        if self.on_gpu:
            from quire.kernels.triton.ops import TritonOps

            ops = TritonOps()
        else:
            from quire.kernels.reference import TorchOps

            ops = TorchOps()
        build = BuildContext(
            config=self.config, ranks=Ranks(), dtype=self.dtype, device=self.device, ops=ops,
            attention=TorchPagedAttention(), max_model_len=4096,
        )  # fmt: skip
        encoder: Any = make_encoder(build)
        with torch.inference_mode():
            for module in encoder.modules():
                for targets in module.targets().values() if hasattr(module, "targets") else ():
                    for target in targets:  # not the padding, which stays 0
                        target.into.normal_(0.0, 0.02)
                if type(module).__name__ == "VisionNorm":
                    module.weight.add_(1.0)
        return encoder

    def wait(self) -> None:
        """Until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any], least: float = 0.4) -> tuple[float, float]:
        """(seconds a call, seconds that the host needs to launch it), the median of several."""
        for _ in range(2):
            work()
        self.wait()
        whole, launched, begin = [], [], time.perf_counter()
        while len(whole) < 3 or (time.perf_counter() - begin < least and len(whole) < 50):
            start = time.perf_counter()
            work()
            launched.append(time.perf_counter() - start)
            self.wait()
            whole.append(time.perf_counter() - start)
        return statistics.median(whole), statistics.median(launched)

    def measure_encoder(self) -> None:
        """ms and TFLOP/s by batch and way."""
        items = self.items(8)
        products, attention = self.operations(items[0])
        self.add(
            "operations", {"products": products, "attention": attention},
            f"{products / 1e12:.2f} T in products, {attention / 1e12:.2f} T in attention, {items[0].rows} rows",
        )  # fmt: skip
        pairs = [(FLASH, FLASH), ("triton", FLASH), (FLASH, "triton"), ("triton", "triton"), ("cudnn", FLASH)]
        pairs.append(("groups", "groups"))
        reference: torch.Tensor | None = None
        usual = dict(attention_ways)
        for whole, windows in [("groups", "groups"), *pairs[:-1]] if self.on_gpu else [("groups", "groups")]:
            try:
                attention_ways.update({WHOLE: whole, WINDOWS: windows})
                rows = self.encoder.encode(items[:2])[1].float()
                reference = rows if reference is None else reference
                error = float((rows - reference).norm() / reference.norm())
                if not error < 0.05:
                    self.add(f"WRONG {whole}/{windows}", error, f"differs from groups by {error:.1e}")
                for batch in (1, 4, 8):
                    seconds, host = self.time(functools.partial(self.encoder.encode, items[:batch]))
                    rate = batch * (products + attention) / seconds / 1e12
                    self.add(
                        f"encoder {whole}/{windows} x{batch}",
                        {"ms": seconds * 1e3, "host_ms": host * 1e3, "tflops": rate, "error": error},
                        f"{seconds * 1e3:.2f} ms, {rate:.0f} TFLOP/s, host {host * 1e3:.1f} ms, differs by {error:.1e}",
                    )
            except Exception as error_of_way:
                traceback.print_exc()
                self.add(f"encoder {whole}/{windows} FAILED", repr(error_of_way), repr(error_of_way)[:200])
        attention_ways.update(usual)

    def measure_attention(self) -> None:
        """One layer's attention."""
        if not self.on_gpu:
            self.add("attention", None, "needs a GPU")
            return
        from quire.kernels.segments import attend_flash, attend_groups
        from quire.kernels.triton.launch import let_threads_launch
        from quire.kernels.triton.packed_attention import PackedTile, packed_attention
        from quire.kernels.triton.vision import rotate

        let_threads_launch()
        vision = self.config.raw["vision_config"]
        heads, dim = vision["num_heads"], vision["hidden_size"] // vision["num_heads"]
        side = round(self.side / 28) * 2
        qkv = torch.randn(side * side, 3 * heads, dim, device=self.device).to(self.dtype)
        q, k, v = qkv.chunk(3, dim=1)
        scale = dim**-0.5
        for kind, lengths in ((WHOLE, np.array([side * side])), (WINDOWS, self.windows(side, side))):
            segments = Segments(lengths, self.device, windows=kind == WINDOWS)
            operations = 4.0 * heads * dim * float((lengths**2).sum())
            cases: list[tuple[str, Callable[[], torch.Tensor]]] = [
                ("flash", functools.partial(attend_flash, q, k, v, segments, scale)),
                ("groups", functools.partial(attend_groups, q, k, v, segments, scale)),
                ("cudnn", functools.partial(self._by_way, "cudnn", kind, q, k, v, segments, scale)),
            ]
            for size in TILES:
                for split in (True, False):
                    name, tile = f"triton {size}{'' if split else ' in one part'}", PackedTile(*size)
                    cases += [(name, functools.partial(packed_attention, q, k, v, segments, scale, tile, split))]
            with ThreadPoolExecutor(8) as pool:  # compile
                compiled = [pool.submit(work) for _, work in cases]
            expected: torch.Tensor | None = None
            for (name, work), done in zip(cases, compiled, strict=True):
                try:
                    done.result()
                    out = work().float()
                    expected = out if expected is None else expected
                    error = float((out - expected).norm() / expected.norm())
                    us = self.graph_us(work)
                    note = "" if error < 0.02 else f" WRONG by {error:.1e}"
                    self.add(
                        f"attention {kind} {name}", {"us": us, "error": error},
                        f"{us:.0f} us, {operations / us / 1e6:.0f} TFLOP/s{note}",
                    )  # fmt: skip
                except Exception as failed:
                    self.add(f"attention {kind} {name}", repr(failed), f"failed: {repr(failed)[:120]}")
        angles = torch.rand(side * side, dim // 2, device=self.device)
        us = self.graph_us(lambda: rotate(qkv[:, : 2 * heads], angles, angles))
        self.add("rotation", us, f"{us:.1f} us a layer")
        norm = self.encoder.blocks[0].norm1
        x, stream = (torch.randn(side * side, heads * dim, device=self.device).to(self.dtype) for _ in range(2))
        us = self.graph_us(lambda: norm.add(x, stream))
        self.add("add and norm", us, f"{us:.1f} us, twice a layer")

    def _by_way(self, way: str, kind: str, *arguments: Any) -> torch.Tensor:
        """By one of `WAYS`."""
        before = attention_ways[kind]
        attention_ways[kind] = way
        try:
            return self.encoder.build.ops.attend_segments(*arguments)
        finally:
            attention_ways[kind] = before

    def graph_us(self, work: Callable[[], Any]) -> float:
        """Microseconds of a call on the device, the median of 20."""
        for _ in range(3):
            work()
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # the host is ahead when the device begins
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def measure_profile(self) -> None:
        """Where the time of a batch goes."""
        from torch.profiler import ProfilerActivity, profile

        items = self.items(4)
        self.encoder.encode(items)
        self.wait()
        activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if self.on_gpu else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            self.encoder.encode(items)
            self.wait()
        spent: dict[str, float] = {}
        for event in profiler.events():
            if str(event.device_type).endswith("CUDA"):
                spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us()
        kinds = {"attention": 0.0, "products": 0.0, "rest": 0.0}
        rest: dict[str, float] = {}
        for name, us in spent.items():
            kind = kind_of(name)
            kinds[kind] += us
            if kind == "rest":
                rest[name] = us
        total = sum(kinds.values()) or 1.0
        shares = ", ".join(f"{kind} {us / 1e3:.2f} ms ({us / total:.0%})" for kind, us in kinds.items())
        self.add("kernels of a batch of 4", {"shares": kinds, "kernels": spent}, shares)
        for name, us in sorted(rest.items(), key=lambda entry: -entry[1])[:10]:
            print(f"     {us / 1e3:8.3f} ms  {name[:110]}", flush=True)

    def measure_graphs(self) -> None:
        """Small images."""
        if not self.on_gpu:
            self.add("graphs", None, "needs a GPU")
            return
        from quire.vision.qwen_vit import EncoderGraphs
        from quire.worker.cuda_graphs import GraphPool

        token = self.config.raw["image_token_id"]
        pool: Any = GraphPool(SimpleNamespace(buffers=SimpleNamespace(slot=torch.zeros(1, device=self.device))))  # type: ignore[arg-type]
        begin = time.perf_counter()
        with torch.inference_mode():
            graphs = EncoderGraphs(self.encoder, pool)
        self.add("capturing", time.perf_counter() - begin, f"{time.perf_counter() - begin:.2f} s")
        for side in (168, 280, 448, 616):
            items = self.processor.prepare([token], [self.picture(side).resize((side, side))]).items
            found = []
            for self.encoder.graphs in (None, graphs):
                rows = self.encoder.encode(items)[0].float()
                found.append((rows, self.time(functools.partial(self.encoder.encode, items))[0] * 1e3))
            self.encoder.graphs = None
            (rows, plain), (other, captured) = found
            error = float((rows - other).norm() / rows.norm())
            self.add(
                f"graphs {side} x {side}", {"plain_ms": plain, "graph_ms": captured, "error": error},
                f"{plain:.2f} ms by kernels, {captured:.2f} ms in a graph, differs by {error:.1e}",
            )  # fmt: skip

    # In an engine

    def prompt(self, seed: int, image: Image.Image | None = None, before: int = 8) -> dict[str, Any]:
        """Some text, the image if there is one, and a question. `before`: tokens before it."""
        generator = np.random.default_rng(seed)
        start, end, soft = (self.config.raw[name] for name in
                            ("vision_start_token_id", "vision_end_token_id", "image_token_id"))  # fmt: skip
        tokens = generator.integers(10, 10_000, before).tolist()
        question = generator.integers(10, 10_000, 16).tolist()
        if image is None:
            return {"prompt_token_ids": [*tokens, *question]}
        return {
            "prompt_token_ids": [*tokens, start, soft, end, *question],
            "multi_modal_data": {"image": image},
        }

    def run_engine(self) -> None:
        """One engine for the parts that need one."""
        parts = [name for name in ("engine", "first", "gaps") if name in self.options.parts]
        if not parts:
            return
        self.__dict__.pop("encoder", None)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        whole, windows = self.options.ways
        os.environ["QUIRE_SEGMENT_ATTENTION"] = f"{whole},{windows}"  # read by the engine's process
        settings: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "seed": 0,
            "encoder_cache_tokens": 32768, **json.loads(self.options.settings),
        }  # fmt: skip
        if self.is_tiny:
            settings |= {"max_num_seqs": 32, "dtype": "float32", "num_gpu_blocks_override": 2048, "device": "cpu"}
        begin = time.perf_counter()
        llm = AsyncLLM(str(self.folder), **settings)
        self.add("start", time.perf_counter() - begin, f"{time.perf_counter() - begin:.1f} s")
        try:
            with asyncio.Runner() as runner:
                works: dict[str, Callable[[AsyncLLM], Coroutine[Any, Any, None]]] = {
                    "engine": self.measure_engine, "first": self.measure_first, "gaps": self.measure_gaps,
                }  # fmt: skip
                runner.run(self.warm_up(llm))
                for name in parts:
                    self.guard(name, lambda name=name: runner.run(asyncio.wait_for(works[name](llm), 120)))  # type: ignore[misc]
        finally:
            llm.shutdown()

    async def warm_up(self, llm: AsyncLLM) -> None:
        """Every shape once."""
        await asyncio.gather(*(self.answer(llm, self.prompt(seed, self.picture(seed)), 8) for seed in range(4)))

    async def answer(self, llm: AsyncLLM, prompt: dict[str, Any], tokens: int) -> list[float]:
        """Times of the tokens of a request, seconds after its start."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin, times, known = time.perf_counter(), [], 0
        async for output in llm.generate(prompt, params):  # type: ignore[arg-type]
            now, count = time.perf_counter() - begin, len(output.outputs[0].token_ids)
            times += [now] * (count - known)
            known = count
        if known != tokens:
            raise RuntimeError(f"{known} tokens were generated instead of {tokens}")
        return times

    async def measure_engine(self, llm: AsyncLLM) -> None:
        """Many requests at once."""
        count = self.requests
        with ThreadPoolExecutor(16) as pool:
            images = list(pool.map(self.picture, range(1000, 1000 + count)))
            token = self.config.raw["image_token_id"]
            begin = time.perf_counter()
            list(pool.map(lambda image: self.processor.prepare([token], [image]).items[0].rows, images))
            rate = count / (time.perf_counter() - begin)
        self.add("host preparation", rate, f"{rate:.0f} images/s with 16 threads on {os.cpu_count()} cores")
        prompts = [self.prompt(1000 + index, image) for index, image in enumerate(images)]
        begin = time.perf_counter()
        times = await asyncio.gather(*(self.answer(llm, prompt, self.tokens) for prompt in prompts))
        seconds = time.perf_counter() - begin
        first = statistics.median(each[0] for each in times)
        self.add(
            "engine", {"seconds": seconds, "images_s": count / seconds, "tokens_s": count * self.tokens / seconds},
            f"{count} requests in {seconds:.2f} s: {count / seconds:.1f} images/s, "
            f"{count * self.tokens / seconds:.0f} tokens/s out, median first token {first:.2f} s",
        )  # fmt: skip

    async def measure_first(self, llm: AsyncLLM) -> None:
        """First tokens."""
        image = self.picture(5000)
        await self.answer(llm, self.prompt(5000, image), 1)
        length = len(self.prompt(0, image)["prompt_token_ids"]) - 1 + self.items(1)[0].rows
        found: dict[str, list[float]] = {name: [] for name in (
            "text", "image in the encoder's cache", "text, KV cached", "image, KV cached", "new image")}  # fmt: skip
        for index in range(self.repeats):
            text = self.prompt(6000 + index, None, length - 16)
            other = self.prompt(7000 + index, image)  # other text before it: its KV is not cached
            fresh = self.prompt(8000 + index, self.picture(8000 + index))
            for name, prompt in zip(found, (text, other, text, other, fresh), strict=True):
                found[name].append((await self.answer(llm, prompt, 1))[0])
        base = {"text, KV cached": None, "text": None}
        for name, times in found.items():
            median = statistics.median(times)
            if name in base:
                note = ""
            else:
                text_name = "text, KV cached" if "KV" in name else "text"
                note = f", {median / statistics.median(found[text_name]) - 1:+.0%} of {text_name}"
            self.add(f"first: {name}", median * 1e3, f"{median * 1e3:.1f} ms ({length} tokens){note}")

    async def measure_gaps(self, llm: AsyncLLM) -> None:
        """Gaps of streams without and with images."""
        for with_images in (False, True):
            gaps: list[float] = []
            stop = asyncio.Event()
            tasks = [asyncio.create_task(self.stream(llm, 9000 + i, gaps, stop)) for i in range(self.streams)]
            await asyncio.sleep(1.0)
            gaps.clear()
            begin, sent, answers = time.perf_counter(), 0, []
            while (now := time.perf_counter() - begin) < self.seconds:
                if with_images and now >= sent:
                    image = await asyncio.to_thread(self.picture, 9500 + sent)
                    answers.append(asyncio.create_task(self.answer(llm, self.prompt(9500 + sent, image), 8)))
                    sent += 1
                await asyncio.sleep(0.02)
            taken = np.array(gaps) * 1e3
            stop.set()
            await asyncio.gather(*tasks, *answers)
            name = "with an image every second" if with_images else "alone"
            p50, p99, most = np.percentile(taken, 50), np.percentile(taken, 99), taken.max()
            slow = float((taken > 2 * p50).mean())
            self.add(
                f"gaps {name}", {"p50": p50, "p99": p99, "max": most, "slow": slow, "tokens": len(taken)},
                f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, largest {most:.1f} ms, {slow:.1%} above twice p50"
                + (f", {sent} images" if with_images else ""),
            )  # fmt: skip
        alone, beside = (self.figures[f"gaps {name}"]["p99"] for name in ("alone", "with an image every second"))
        self.add("gaps: p99 ratio", beside / alone, f"{beside / alone:.2f}")

    async def stream(self, llm: AsyncLLM, seed: int, gaps: list[float], stop: asyncio.Event) -> None:
        """A stream of tokens, until told to stop."""
        params = SamplingParams(temperature=0, max_tokens=3500, ignore_eos=True, detokenize=False)
        last, known = 0.0, 0
        while not stop.is_set():
            async for output in llm.generate(self.prompt(seed, None, 112), params):  # type: ignore[arg-type]
                now, count = time.perf_counter(), len(output.outputs[0].token_ids)
                if last and known:
                    gaps += [now - last, *[0.0] * (count - known - 1)]
                last, known = now, count
                if stop.is_set():
                    break
            known, last = 0, 0.0


def kind_of(kernel: str) -> str:
    """Attention, products or the rest, by a kernel's name."""
    name = kernel.lower()
    if any(part in name for part in ("flash", "fmha", "_attend", "sdpa", "attention")):
        return "attention"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")):
        return "products"
    return "rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--ways", nargs=2, default=[FLASH, FLASH], choices=WAYS, metavar=("WHOLE", "WINDOWS"))
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    parser.add_argument("--tiny", action="store_true")
    bench = Bench(parser.parse_args())
    attention_ways.update(zip((WHOLE, WINDOWS), bench.options.ways, strict=True))
    bench.guard("encoder", bench.measure_encoder)
    bench.guard("attention", bench.measure_attention)
    bench.guard("profile", bench.measure_profile)
    bench.guard("graphs", bench.measure_graphs)
    try:
        bench.run_engine()
    except Exception as error:
        traceback.print_exc()
        bench.add("the engine FAILED", repr(error), repr(error)[:200])
    bench.save()
    print("\n| figure | value |\n|---|---|")
    for name, text in bench.lines:
        print(f"| {name} | {text} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
