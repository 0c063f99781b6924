"""Decodes a video in a process of its own, with limits on memory and time: decoders are large and read hostile files.

    python -I video_child.py FORMAT MOST_FRAMES FPS MOST_PIXELS

The file comes in standard input. What goes out: a line of JSON, `{"width", "height", "count", "fps"}` or `{"error"}`,
and then, if that was no error, so many frames of width * height * 3 bytes. Imports nothing of quire.
"""

import io
import json
import math
import resource
import sys

MEMORY_BYTES = 3 << 30
CPU_SECONDS = 30
LONGEST_SECONDS = 1e6


def main(kind: str, most: int, fps: float, most_pixels: int) -> None:
    """`most_pixels`: of all frames together."""
    data = sys.stdin.buffer.read()
    import av
    import numpy  # noqa: F401 (used by frames; loaded before there are limits)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    out = sys.stdout.buffer
    # The container is what the file's first bytes say, and nothing that a file names is opened.
    nothing = {"protocol_whitelist": ""}
    container = av.open(io.BytesIO(data), "r", format=kind, options=nothing, metadata_errors="ignore")
    if not container.streams.video:
        raise ValueError("it has no picture")
    stream = container.streams.video[0]
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    width, height = int(stream.codec_context.width), int(stream.codec_context.height)
    if width < 1 or height < 1:
        raise ValueError("its frames have no size")
    seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    if not seconds and container.duration:
        seconds = container.duration / av.time_base
    if not 0 <= seconds < LONGEST_SECONDS:
        raise ValueError("its length makes no sense")
    room = max(1, min(most, most_pixels // (width * height)))
    count = max(1, min(room, math.ceil(seconds * fps)))
    if count < seconds * fps:
        fps = count / seconds
    out.write(json.dumps({"width": width, "height": height, "count": count, "fps": fps}).encode() + b"\n")
    out.flush()
    sent, last, begin = 0, b"", None
    for frame in container.decode(stream):  # the first at or after each wanted time
        begin = frame.time if begin is None else begin
        at = (frame.time or 0.0) - (begin or 0.0) + 1e-3
        if last and at < sent / fps:
            continue
        if (frame.width, frame.height) != (width, height):
            frame = frame.reformat(width, height)
        last = frame.to_ndarray(format="rgb24").tobytes()
        while sent < count and at >= sent / fps:
            out.write(last)
            sent += 1
        if sent >= count:
            break
    if not last:
        raise EOFError("it has no frame that can be decoded")
    for _ in range(count - sent):
        out.write(last)
    out.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    except BrokenPipeError:
        pass
    except Exception as error:  # whatever a decoder raises for damaged data; after the first line the frames end early
        sys.stdout.buffer.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}).encode() + b"\n")
