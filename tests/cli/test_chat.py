"""`quire chat`: piped questions, commands, Ctrl-C, and conversations that become too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from quire import LLM, LoRARequest, RequestOutputKind, SamplingParams
from quire.cli.conversation import LocalConversation
from quire.errors import CacheTooSmallError
from quire.paths import cache_dir
from tests.adapters.beside import Beside


@pytest.fixture(scope="module")
def llm(byte_llama):
    with LLM(str(byte_llama), kv_cache_memory_bytes=1 << 20) as llm:
        yield llm


@pytest.fixture
def conversation(llm):
    yield LocalConversation(llm, params(max_tokens=4))
    llm.llm_engine.check_idle()


def params(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **fields)


def test_a_conversation_with_an_adapter(byte_llama, tmp_path):
    beside = Beside(byte_llama, tmp_path)
    adapter = LoRARequest("mine", 1, beside.write("mine", target_modules="all-linear"))
    settings = {"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "enable_lora": True}
    with LLM(str(byte_llama), **settings) as llm:
        replies = [LocalConversation(llm, params(max_tokens=6), None, one).ask("Hi").text for one in ([adapter], None)]
        prompt = llm.chat([{"role": "user", "content": "Hi"}], params(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
        tokens = [beside.tokens(list(prompt), 6, weights) for weights in ({"mine": 1.0}, {})]
        assert replies == [llm.get_tokenizer().decode(one) for one in tokens]
        assert tokens[0] != tokens[1]


def test_every_piped_line_gets_a_reply_with_the_lines_before_as_context(quire, byte_llama):
    arguments = ["chat", byte_llama, "--temperature", 0, "--max-tokens", 4, "--stats"]
    ran = quire(*arguments, stdin="Hi\n\nAnd?\n")
    assert ran.code == 0, ran.err
    speeds = [line for line in ran.err.splitlines() if line.startswith("[4 tokens")]
    assert len(speeds) == 2
    assert "prompt 24]" in speeds[0]
    assert "cached]" in speeds[1]


def test_commands(quire, byte_llama):
    stdin = "/help\n/system Be kind\n/system\n/reset\n/stats\n/exit\nnever asked\n"
    ran = quire("chat", byte_llama, stdin=stdin)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.count("system prompt: Be kind") == 2
    for word in ("/reset  ", "the conversation is empty", "prompt tokens"):
        assert word in ran.err


def test_an_unknown_command_is_an_error(quire, byte_llama):
    ran = quire("chat", byte_llama, stdin="/fly\n")
    assert ran.code == 2
    assert "unknown command /fly" in ran.err


def test_a_model_without_a_template_is_refused_with_advice(quire, byte_llama, tmp_path):
    for file in byte_llama.iterdir():
        if file.suffix != ".jinja":
            (tmp_path / file.name).symlink_to(file)
    ran = quire("chat", tmp_path, stdin="Hi\n")
    assert ran.code == 2
    assert "no chat template" in ran.err
    assert (
        quire("chat", tmp_path, "--chat-template", "{{ messages[0].content }}", "--max-tokens", 2, stdin="Hi\n").code
        == 0
    )


def test_a_conversation_that_is_too_long_suggests_reset_and_works_afterwards(conversation, capsys):
    with pytest.raises(CacheTooSmallError, match="/reset starts a new one"):
        conversation.ask("x" * 300)
    assert conversation.ask("short").tokens == 4
    conversation.reset()
    assert conversation.ask("short").tokens == 4


def test_a_full_context_is_noted(llm, capsys):
    reply = LocalConversation(llm, params(max_tokens=None)).ask("Hi")
    assert "context of 128 tokens is full" in reply.note
    assert reply.prompt_tokens + reply.tokens == 128


def test_ctrl_c_stops_the_reply_and_frees_its_blocks(llm, capsys):
    conversation = LocalConversation(llm, params(max_tokens=None))
    step, steps = llm.llm_engine.step, 0

    def interrupting():
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.llm_engine.step = interrupting
    try:
        reply = conversation.ask("Hi")
    finally:
        llm.llm_engine.step = step
    assert reply.note == "(stopped)"
    assert 0 < reply.tokens < 10
    llm.llm_engine.check_idle()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert conversation.ask("And?").cached_tokens > 0


def test_a_conversation_works_off_the_main_thread(conversation, capsys):
    replies = []
    thread = threading.Thread(target=lambda: replies.append(conversation.ask("Hi")))
    thread.start()
    thread.join()
    assert replies[0].tokens == 4


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_on_a_terminal_ctrl_c_stops_a_reply_and_ctrl_d_exits(byte_llama, tmp_path):
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "kernels").symlink_to(cache_dir("kernels"))  # already built
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "quire.cli.main", "chat", str(byte_llama), "--ignore-eos"]
    command += ["--hf-overrides", '{"max_position_embeddings": 50000}', "--kv-cache-memory-bytes", "20M"]
    chat = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "QUIRE_CACHE": str(tmp_path / "quire")}
    )
    os.close(theirs)
    screen = _Screen(ours)
    try:
        screen.wait_for("/help lists commands")
        screen.wait_for("> ")
        os.write(ours, b"Hi\r")
        screen.wait_for("Hi")
        screen.wait_for_more(20)
        chat.send_signal(signal.SIGINT)
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        os.write(ours, b"\x04")
        assert chat.wait(timeout=60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)
    assert "Hi" in (tmp_path / "quire" / "chat_history").read_text()


class _Screen:
    """The output of a program on a pseudo-terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._seen = ""

    def _read(self) -> None:
        self._seen += os.read(self._terminal, 4096).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        while text not in self._seen:
            self._read()
        self._seen = self._seen.partition(text)[2]

    def wait_for_more(self, characters: int) -> None:
        while len(self._seen) < characters:
            self._read()
