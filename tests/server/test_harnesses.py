"""lm-eval and guidellm, from the PATH, against a server. One that is not installed is skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quire.loading.hub import DEFAULT_MODEL
from tests.server.conftest import MODEL, Live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FACTS = [
    {"question": "The capital of France is", "choices": [" Paris", " a small fish"], "answer": 0},
    {"question": "The capital of Italy is", "choices": [" a green tree", " Rome"], "answer": 1},
]
TASKS = {
    "facts": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    'target_delimiter: ""\nmetric_list:\n  - metric: acc\n',
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{question}}{{choices[answer]}}"\n'
    "metric_list:\n  - metric: bits_per_byte\n",
    "written": 'output_type: generate_until\ndoc_to_target: "{{choices[answer]}}"\ngeneration_kwargs:\n'
    '  until: ["."]\n  max_gen_toks: 8\n  temperature: 0\nmetric_list:\n  - metric: exact_match\n',
}


def run(home: Path, *command: str) -> str:
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [program, *command[1:]], cwd=home, env=environment, text=True, capture_output=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class TestLmEval:
    def results(self, home: Path, model: str, arguments: str, *more: str, tasks: str) -> dict[str, Any]:
        """What it found for tasks of two questions that lie in a file."""
        (home / "facts.jsonl").write_text("\n".join(map(json.dumps, FACTS)))
        for name, task in TASKS.items():
            asks = "" if name == "rolling" else "{{question}}"
            data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {home}/facts.jsonl\ntest_split: train\n"
            (home / f"{name}.yaml").write_text(f'task: {name}\n{data}doc_to_text: "{asks}"\n{task}')
        where = ("--tasks", tasks, "--include_path", str(home), "--output_path", str(home / "out"))
        run(home, "lm_eval", "run", "--model", model, "--model_args", arguments, *where, *more)
        (found,) = (home / "out").rglob("results_*.json")
        results: dict[str, Any] = json.loads(found.read_text())["results"]
        return results

    def test_completions_with_the_servers_tokenizer(self, real: Live, tmp_path: Path) -> None:
        arguments = f"model={DEFAULT_MODEL},base_url={real.url}/v1/completions,tokenizer_backend=remote,max_length=1024"
        found = self.results(
            tmp_path, "local-completions", f"{arguments},num_concurrent=2", tasks="facts,rolling,written"
        )  # fmt: skip
        assert found["facts"]["acc,none"] == found["written"]["exact_match,none"] == 1.0
        assert 0.3 < found["rolling"]["bits_per_byte,none"] < 3

    def test_chats(self, real: Live, tmp_path: Path) -> None:
        arguments = f"model={DEFAULT_MODEL},base_url={real.url}/v1/chat/completions,num_concurrent=2"
        found = self.results(tmp_path, "local-chat-completions", arguments, "--apply_chat_template", tasks="written")
        assert 0 <= found["written"]["exact_match,none"] <= 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(live: Live, tiny_model: Path, tmp_path: Path, path: str) -> None:
    """Every request succeeds, and it counts the tokens that the server says."""
    backend = f"kind=openai_http,target={live.url},model={MODEL},request_format={path}"
    data = "kind=synthetic_text,prompt_tokens=16,output_tokens=8"
    run(
        tmp_path, "guidellm", "run", "--backend", backend,
        "--profile", "kind=constant,rate=5", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={tiny_model}", "--data", data,
        "--disable-console", "--output", f"kind=json,path={tmp_path}/out.json",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {8}
