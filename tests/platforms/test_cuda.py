"""Whether a GPU can be used is reported in one line, with what was found and what is needed."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.platforms import choose, cuda
from quire.platforms.cpu import CpuPlatform
from quire.platforms.cuda import CudaPlatform, choose_kernels, driver_version, runs_on
from quire.worker import building
from quire.worker.building import choose_dtype

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx\nor install another torch"
)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch built for CUDA 12.8 that fails to start with the given message; the given driver version."""

    def fail(message: str, driver: str = "470.82.01") -> None:
        def init() -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(cuda, "driver_version", lambda: driver)

    return fail


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card of this capability, seen by a torch with code for the given architectures."""

    def see(major: int, minor: int, built_for: tuple[str, ...] = (), gib: int = 24) -> None:
        properties = SimpleNamespace(name="Test Card", major=major, minor=minor, total_memory=gib * 2**30)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test Card")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)

    return see


def refusal(device: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        choose(device)
    assert caught.value.parameter == "device"
    assert "\n" not in str(caught.value)
    assert "device='cpu'" in str(caught.value)
    return str(caught.value)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"this torch ({torch.__version__}) is built without CUDA" in refusal()


def test_an_old_driver_is_reported_with_its_version_and_the_needed_one(no_gpu: Any) -> None:
    no_gpu(TOO_OLD)
    said = refusal()
    assert "the NVIDIA driver (470.82.01) supports CUDA up to 11.4" in said
    assert "needs 12.8" in said


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Found no NVIDIA driver on your system. Please check …", "there is no NVIDIA driver here"),
        ("No CUDA GPUs are available", "the NVIDIA driver (470.82.01) shows no GPU"),
        ("Unexpected error from cudaGetDeviceCount()\nmore", "CUDA does not start: Unexpected error from cudaGet"),
    ],
)
def test_other_reasons(no_gpu: Any, message: str, shown: str) -> None:
    no_gpu(message)
    assert shown in refusal()


def test_a_hidden_gpu_is_reported_as_hidden(no_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    no_gpu("No CUDA GPUs are available")
    assert "CUDA_VISIBLE_DEVICES is ''" in refusal()


def test_a_card_that_does_not_respond_is_one_line(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might …")

    card(9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    assert "CUDA does not start: CUDA error: all CUDA-capable devices are busy or unavailable;" in refusal()


@pytest.mark.parametrize("driver", ["470.82.01", ""])
def test_auto_uses_the_cpu_and_says_why_only_where_a_gpu_was_expected(
    no_gpu: Any, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    no_gpu(TOO_OLD, driver)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose("auto"), CpuPlatform)
    assert ("supports CUDA up to 11.4" in caplog.text) == bool(driver)


def test_the_driver_version_is_read_or_absent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  Tue Mar 5 2024\nGCC 12.2"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(cuda, "Path", lambda path: tmp_path / "version")
    assert driver_version() == "550.54.15"
    monkeypatch.setattr(cuda, "Path", lambda path: tmp_path / "nothing")
    assert driver_version() == ""


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((7, 5), ["sm_80", "compute_80"], False),
        ((7, 5), [], True),
    ],
)
def test_code_for_an_architecture_runs_on_its_family_or_on_later_ones(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    assert runs_on(capability, built_for) == runs


def test_a_card_torch_has_no_code_for_is_refused(card: Any) -> None:
    card(12, 0, ("sm_80", "sm_90"))
    assert "has no code for Test Card (sm_120), only for sm_80 sm_90" in refusal()


def test_a_card_that_is_too_old_is_refused(card: Any) -> None:
    card(6, 1)
    assert "Test Card has compute capability 6.1, and quire needs 7.0" in refusal()


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_an_older_card_gets_torch_kernels_and_a_warning(
    card: Any, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    card(7, 5)
    with caplog.at_level(logging.WARNING):
        platform = choose(device)
    assert (platform.ops, platform.attention) == cuda.PLAIN
    assert "compute capability 7.5, and quire's own kernels need 8.0" in caplog.text


def test_without_triton_there_is_a_warning_and_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("Test Card", (9, 0)) == cuda.PLAIN
    assert 'pip install "quire[cuda]"' in caplog.text


def test_a_usable_card_gets_our_kernels_and_limits_by_its_size(card: Any) -> None:
    pytest.importorskip("triton")
    card(9, 0, gib=141)
    platform = choose("cuda")
    assert isinstance(platform, CudaPlatform)
    assert (platform.ops, platform.attention) == cuda.FAST
    assert (platform.max_num_seqs, platform.max_num_batched_tokens) == (1024, 16384)


# Number formats


@pytest.mark.parametrize("asked", ["bfloat16", "auto"])
def test_bfloat16_is_refused_or_replaced_where_a_gpu_has_none(
    card: Any, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    card(7, 5)
    platform = choose("cuda")
    model, files = SimpleNamespace(dtype="bfloat16"), SimpleNamespace(gguf=None)
    building._warn_once.cache_clear()
    if asked == "auto":
        with caplog.at_level(logging.WARNING):
            assert choose_dtype("auto", model, files, platform) is torch.float16  # type: ignore[arg-type]
        assert "Test Card has no bfloat16" in caplog.text
    else:
        with pytest.raises(ConfigError, match="bfloat16, which Test Card does not have"):
            choose_dtype(asked, model, files, platform)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "gguf", "chosen"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("float16", None, torch.float16),
        ("float32", None, torch.bfloat16),
        (None, "file", torch.bfloat16),
    ],
)
def test_a_gpu_takes_the_checkpoints_format_and_bfloat16_for_float32(
    card: Any, own: str | None, gguf: str | None, chosen: torch.dtype
) -> None:
    card(8, 0)
    model, files = SimpleNamespace(dtype=own), SimpleNamespace(gguf=gguf)
    assert choose_dtype("auto", model, files, choose("cuda")) is chosen  # type: ignore[arg-type]
