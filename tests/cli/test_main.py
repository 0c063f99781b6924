"""The command line itself: help, flags, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.cli import main as main_module
from quire.cli.bench import BENCHMARKS
from quire.cli.main import COMMANDS

HELPFUL = [*((name,) for name in COMMANDS), *(("bench", name) for name in BENCHMARKS)]


@pytest.mark.parametrize("command", HELPFUL, ids=" ".join)
def test_every_command_has_help(quire, command):
    ran = quire(*command, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"usage: quire {' '.join(command)}")
    if command != ("bench",):
        assert "examples:" in ran.out


def test_no_command_shows_the_list(quire):
    ran = quire()
    assert ran.code == 0
    assert all(name in ran.out for name in COMMANDS)


def test_version(quire):
    assert quire("--version").out == f"quire {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["chat"], ["bench", "throughput"]], ids=lambda a: " ".join(a) or "top")
def test_help_needs_neither_torch_nor_transformers(arguments):
    code = (
        "import sys; from quire.cli.main import main\n"
        f"try: main({[*arguments, '--help']!r})\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "bogus"),
        (["chat", "--temprature", "1"], "did you mean --temperature?"),
        (["chat", "--max-model-len", "many"], "'many' is not a size"),
        (["chat", "--dtype", "int3"], "--dtype"),
        (["chat", "--hf-overrides", "[1]"], "not a JSON object"),
        (["chat", "--block-size", "0"], "block_size must be an integer of at least 1, got 0"),
        (["chat", "a", "--model", "b"], "two models are given"),
        (["chat", "./nowhere"], "no file or folder './nowhere'"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "-"], "standard input is empty"),
        (["generate", "x", "--logit-bias", '{"a": 1}'], "keys must be token ids"),
        (["bench", "throughput", "--num-prompts", "0"], "at least 1"),
        (["bench", "waste", "--cache-tokens", "10"], "is too small for one sequence"),
        (["pull", "no such model"], "there is no model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(quire, arguments, said):
    ran = quire(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("quire: error: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err


def test_errors_of_sampling_values_name_the_parameter(quire, byte_llama):
    ran = quire("generate", "x", "--model", byte_llama, "--temperature", "900")
    assert (ran.code, ran.err) == (2, "quire: error: temperature must be in [0, 100], got 900.0; the default is 1\n")


def test_an_unexpected_error_is_one_line_and_exit_code_1(quire, monkeypatch):
    def fail(arguments):
        raise RuntimeError("the moon is down")

    monkeypatch.setattr(main_module, "_run", fail)
    ran = quire("env")
    assert (ran.code, ran.err) == (1, "quire: unexpected error: RuntimeError: the moon is down (--debug shows where)\n")
    with pytest.raises(RuntimeError):
        quire("env", "--debug")


def test_an_interrupt_exits_with_130(quire, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_run", interrupt)
    assert quire("env").code == 130


def test_a_closed_output_pipe_is_not_an_error():
    command = f"{sys.executable} -m quire.cli.main generate --help | head -n 1"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=Path.cwd())
    assert "Traceback" not in ran.stderr
