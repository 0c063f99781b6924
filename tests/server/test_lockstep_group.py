"""A server with two engines that share the experts: one dies, both are restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.executor.mixtures import write_mixture
from tests.server.served import served
from tests.server.test_replicas import ADMIN, FLAGS, Pair


@pytest.mark.slow
def test_engines_that_share_experts_restart_together(
    tmp_path: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = write_mixture(tmp_path / "model", "qwen2-moe")
    prompts = [f"{i} the world" for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].text for output in make_llm(folder).generate(prompts, params, use_tqdm=False)]
    with served(str(folder), *FLAGS, "--enable-expert-parallel", "--num-redundant-experts", "2") as process:
        pair = Pair(process)
        assert texts(pair, prompts) == expected
        moved = pair.client.post("/admin/rebalance_experts", headers=ADMIN).raise_for_status().json()
        assert moved["after"] <= moved["before"]
        assert texts(pair, prompts) == expected
        assert pair.scrape().sum("quire:expert_rank_load_max_over_mean", engine="0") > 0
        for victim in (0, 1):
            before = process.children
            os.kill(before[victim], signal.SIGKILL)
            pair.until(lambda before=before: not set(before) & set(process.children) and len(process.children) == 2)
            pair.until(lambda: pair.client.get("/ready").status_code == 200 and pair.stats()["status"] == "serving")
            assert texts(pair, prompts) == expected
        children = process.children
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def texts(pair: Pair, prompts: list[str]) -> list[str]:
    return [choice["text"] for choice in pair.complete(prompts).raise_for_status().json()["choices"]]
