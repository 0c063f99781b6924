"""Training end to end on a tiny random target: it learns, it can be interrupted, and wrong inputs are refused."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.cli.main import main
from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.training import trainer as trainer_module
from quire.training.data import DataReader
from quire.training.run import DraftSettings, choose_tokens, train_draft
from quire.training.store import TokenSequence
from quire.training.trainer import TrainSettings, epoch_batches, schedule
from tests.conftest import TINY_VOCAB, tiny_tokenizer
from tests.training.conftest import write_target

WORDS = "the sand, an x. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 200)
    return path


def settings(text: Path, **changes) -> DraftSettings:
    training = TrainSettings(steps=3, epochs=changes.pop("epochs", 4), batch_tokens=256, learning_rate=1e-2)
    # The random target says other tokens than the text: all can be proposed.
    fixed = {"held_out_share": 0.1, "max_length": 64, "dtype": "float32", "draft_vocab": TINY_VOCAB}
    return DraftSettings((text,), train=training, **fixed, **changes)


def config(target: Path) -> EngineConfig:
    return EngineConfig(model=str(target), device="cpu", dtype="float32")


def test_it_learns_and_an_interrupted_run_goes_on(target, text, tmp_path, monkeypatch):
    whole = train_draft(config(target), tmp_path / "whole", settings(text))
    # The text repeats itself and the target is deterministic: what it says can be learned.
    assert whole.after.by_position[0] > 0.2 > 5 * whole.before.by_position[0]
    assert whole.after.by_position == sorted(whole.after.by_position, reverse=True)
    assert whole.after.tokens_per_step == pytest.approx(1 + sum(whole.after.by_position))
    assert not (tmp_path / "whole/work").exists()
    assert json.loads((tmp_path / "whole/training.json").read_text())["after"]["chains"] == whole.after.chains > 0

    monkeypatch.setattr(trainer_module, "SAVE_SECONDS", 0.0)

    @contextmanager
    def interrupted(_):
        def show(trainer, loss):
            if trainer.state.step == 8:
                raise KeyboardInterrupt

        yield show

    with pytest.raises(KeyboardInterrupt):
        train_draft(config(target), tmp_path / "parts", settings(text), bar=interrupted)
    assert not (tmp_path / "parts/model.safetensors").exists()
    notes: list[str] = []
    train_draft(config(target), tmp_path / "parts", settings(text), notes.append)
    assert "going on at step 7" in notes
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_command_answers_prompts_and_writes_a_head(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "0.01")
    lines = [{"messages": [{"role": "user", "content": f"the {word}"}]} for word in ("sea", "world", "sand", "man")]
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    ran = main(
        ["train-draft", str(target), "--data", str(data), "--regenerate", "12", "-o", str(out), "--epochs", "2",
         "--unroll", "2", "--max-length", "64", "--draft-vocab", "24", "--head-dtype", "float16", "--device", "cpu",
         "--dtype", "float32"]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert ran == 0, shown.err
    assert "the model answers 7 prompts" in shown.err  # the held-out one once, greedily
    assert "24 tokens" in shown.out and "first 2" in shown.out
    stored = load_file(out / "model.safetensors")
    assert stored["lm_head.weight"].shape == (24, 32) and stored["fc.weight"].dtype == torch.float16


def test_inputs_that_are_refused(target, text, tmp_path):
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "the"}]}\n')
    with pytest.raises(ValidationError, match="line 1.*--regenerate"):
        train_draft(config(target), tmp_path / "a", settings(chat))
    chat.write_text('{"question": "the"}\n')
    with pytest.raises(ValidationError, match="none of messages, prompt and text"):
        train_draft(config(target), tmp_path / "b", settings(chat))
    with pytest.raises(ValidationError, match="not an empty folder"):
        train_draft(config(target), tmp_path, settings(text))
    with pytest.raises(ValidationError, match="no data"):
        train_draft(config(target), tmp_path / "c", DraftSettings())
    short = tmp_path / "short.txt"
    short.write_text("the")
    with pytest.raises(ValidationError, match="0 sequences"):
        train_draft(config(target), tmp_path / "d", settings(short))
    work = tmp_path / "d"  # what the last run left there belongs to other settings
    with pytest.raises(ValidationError, match="other settings"):
        train_draft(config(target), work, settings(text))
    shallow = write_target(tmp_path / "shallow", 2)
    with pytest.raises(ValueError, match="2 layers"):
        train_draft(config(shallow), tmp_path / "e", settings(text))


def learned_text(sequence: TokenSequence) -> str:
    return tiny_tokenizer().decode(sequence.tokens[sequence.learned])


def test_what_is_learned_of_chats_and_prompts(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
                      {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]},
        {"prompt": "one", "response": "two"},
        {"text": "all of it"},
        {"custom_id": "7", "url": "/v1/completions", "body": {"prompt": "one", "response": "two"}},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = DataReader(tiny_tokenizer(), 64).read_file(path, answers=False)
    assert list(map(learned_text, found.sequences)) == ["two</s>four</s>", "two</s>", "all of it", "two</s>"]
    asked = DataReader(tiny_tokenizer(), 64).read_file(path, answers=True)
    assert (
        tiny_tokenizer().decode(asked.prompts[0]) == "<|user|>one</s><|assistant|>two</s><|user|>three</s><|assistant|>"
    )
    assert not asked.sequences and len(asked.prompts) == 4


def test_traffic_of_batches_and_sessions(tmp_path):
    from quire.sessions.log import SessionStore

    requests = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "one"}]}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "two"}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "failed"}},
    ]  # fmt: skip
    results = [
        {"id": "1", "custom_id": "b", "response": {"status_code": 200, "body": {"choices": [{"text": "second"}]}}},
        {"id": "2", "custom_id": "a",
         "response": {"status_code": 200, "body": {"choices": [{"message": {"content": "first"}}]}}},
        {"id": "3", "custom_id": "c", "response": {"status_code": 500, "body": {"error": {}}}},
    ]  # fmt: skip
    log = {"logger": "quire.requests", "prompt": "logged", "params": ""}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, requests)))
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, results)))
    (tmp_path / "server.log").write_text("starting\n" + json.dumps(log) + "\n")
    (tmp_path / "sessions").mkdir()
    with SessionStore.open(tmp_path / "sessions") as store:
        store.create("talk", tiny_tokenizer()("kept words")["input_ids"])
    reader = DataReader(tiny_tokenizer(), 64)
    found = reader.read_traffic(tmp_path, answers=False)
    assert sorted(map(learned_text, found.sequences)) == ["first</s>", "kept words", "second</s>"]
    asked = reader.read_traffic(tmp_path, answers=True).prompts
    assert sorted(map(tiny_tokenizer().decode, asked)) == [
        "<|user|>one</s><|assistant|>", "failed", "logged", "two"
    ]  # fmt: skip


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    tokens = np.repeat(np.arange(10, dtype=np.int32), np.arange(1, 11))  # token 9 ten times, token 0 once
    sequence = TokenSequence(tokens, tokens != 9)
    chosen, share = choose_tokens([sequence], 16, 3, always=[0])
    assert chosen.tolist() == [0, 7, 8] and share == pytest.approx((1 + 8 + 9) / 45)
    assert len(choose_tokens([sequence], 16, None)[0]) == 16  # a multiple of 64, no more than there are


def test_batches_have_every_sequence_once_and_fit():
    lengths = np.random.default_rng(1).integers(4, 100, 300)
    batches = epoch_batches(lengths, TrainSettings(batch_tokens=400), 2)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    assert max(len(batch) * lengths[batch].max() for batch in batches) <= 400
    assert batches == epoch_batches(lengths, TrainSettings(batch_tokens=400), 2)
    assert batches != epoch_batches(lengths, TrainSettings(batch_tokens=400), 3)


def test_the_learning_rate_rises_and_falls():
    rates = [schedule(progress) for progress in np.linspace(0, 1, 201)]
    top = int(np.argmax(rates))
    assert rates[top] == pytest.approx(1.0, abs=0.01) and 0 < top < 20
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
