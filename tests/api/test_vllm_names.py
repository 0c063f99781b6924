"""Scripts written for vLLM find its names here, and need only another import."""

from __future__ import annotations

import argparse
import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.errors import ConfigError, ValidationError
from quire.exceptions import VLLMValidationError
from quire.logprobs import FlatLogprobs
from quire.sampling_params import RequestOutputKind
from quire.vllm_arguments import BEAMS, METHODS, POOLING, PROMPT, SAMPLING
from tests.conftest import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=4)
DELTA = RequestOutputKind.DELTA
TINY = {"device": "cpu", "num_gpu_blocks_override": 16, "max_model_len": 128}


@pytest.mark.parametrize(
    "module, names",
    [
        ("quire.sampling_params", "SamplingParams BeamSearchParams StructuredOutputsParams RequestOutputKind"),
        ("quire.outputs", "RequestOutput CompletionOutput PoolingRequestOutput EmbeddingRequestOutput"),
        ("quire.outputs", "ScoringRequestOutput ScoringOutput"),
        ("quire.inputs", "TextPrompt TokensPrompt PromptType"),
        ("quire.logprobs", "Logprob"),
        ("quire.lora.request", "LoRARequest"),
    ],
)
def test_names_in_vllms_modules(module: str, names: str) -> None:
    for name in names.split():
        assert getattr(import_module(module), name) is getattr(quire, name)


def test_the_version_as_numbers() -> None:
    assert ".".join(map(str, quire.__version_tuple__)) == quire.__version__


def test_engines_from_engine_args(tiny_model: Path) -> None:
    args = EngineArgs(model=str(tiny_model), quantization=None, enable_lora=False, block_size=None, **TINY)
    assert args.block_size == 16
    with LLM.from_engine_args(args) as llm:
        expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("0", "abc", GREEDY)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.shutdown()
    assert outputs[-1].outputs[0].text == expected
    with pytest.raises(TypeError, match="frobnicate"):
        EngineArgs(frobnicate=1)


def test_a_scripts_command_line_sets_an_engine(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--temperature", type=float, default=0.5)
    given = ["--model", "a-model", "--max_model_len", "4k", "-O3", "--enforce-eager=true", "--hf-overrides.a", "1"]
    monkeypatch.setattr("sys.argv", ["script.py", *given])
    args = parser.parse_args()
    assert args.temperature == 0.5
    settings = {name: value for name, value in vars(args).items() if name != "temperature"}
    assert settings == {"model": "a-model", "max_model_len": 4000, "enforce_eager": True, "hf_overrides": {"a": 1}}
    assert EngineArgs.from_cli_args(args) == EngineArgs(**settings)
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-prompt-adapter"])
    assert "adapters" in capsys.readouterr().err
    plain = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs.from_cli_args(plain.parse_args(["--seed", "3"])).seed == 3


def test_an_async_engine_from_engine_args(tiny_model: Path) -> None:
    async def last() -> Any:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(tiny_model), disable_log_stats=True, **TINY))
        async with engine:
            return [output async for output in engine.generate("abc", GREEDY, "id-1", lora_request=None)][-1]

    output = asyncio.run(last())
    assert output.finished
    assert output.request_id == "id-1"


def test_queue_now_and_collect_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["abc", "the world", "xyz"]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    ids = llm.enqueue(prompts[:2], GREEDY)
    ids += llm.enqueue(prompts[2], GREEDY)
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == ids
    assert [output.outputs[0].token_ids for output in found] == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    llm.enqueue(prompts[:2], GREEDY)
    llm.enqueue(prompts, GREEDY)
    monkeypatch.setattr(llm, "_gather", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.wait_for_completion(use_tqdm=False)
    assert_idle(llm)


def test_iteration_tokens_are_counted_as_outputs_come(tiny_model: Path) -> None:
    """A step counts if it has outputs: the tokens it generated, and prompts that got their first token or their vector
    by then, less what was cached."""

    def counted(llm: LLM) -> tuple[int, float]:
        metric = next(one for one in llm.get_metrics() if one.name == "quire:iteration_tokens_total")
        return sum(metric.counts), metric.value

    with LLM(tiny_model, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        prompt = list(range(5, 45))
        llm.generate(prompt, GREEDY, use_tqdm=False)  # in chunks of 16: two steps have no outputs
        assert counted(llm) == (4, 40 + 4)
        llm.generate(prompt, GREEDY, use_tqdm=False)  # 32 of 40 are cached
        assert counted(llm) == (8, 44 + 8 + 4)
        llm.embed([[5, 6, 7]], use_tqdm=False)
        assert counted(llm) == (9, 56 + 3)
        llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert counted(llm) == (10, 59 + 2 + 1)
        next(llm.stream(prompt[::-1], SamplingParams(temperature=0, max_tokens=9)))  # and is aborted
        count, total = counted(llm)
        llm.generate([9], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert counted(llm) == (count + 1, total + 2)


# Parameters

SAMPLING_FIELDS = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind skip_clone structured_outputs logit_bias
    allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection
    logprob_token_ids stream_interval routed_experts_prompt_start trace_decode_token_ids truncate_prompt_tokens
    best_of use_beam_search early_stopping length_penalty logits_processors guided_decoding
"""
"""Of vLLM's `SamplingParams`, in its releases 0.6 to 0.33."""


@pytest.mark.parametrize("name", SAMPLING_FIELDS.split())
def test_every_field_of_vllms_sampling_params_is_known(name: str) -> None:
    if name in SAMPLING:
        accepted = SAMPLING[name].accepts
        for value in (None, *(accepted or (1,))):  # type: ignore[misc]
            assert SamplingParams(temperature=0.5, **{name: value}) == SamplingParams(temperature=0.5)
        if accepted is not None:
            with pytest.raises(ValidationError, match=f"{name}=.* is not supported by quire: .+"):
                SamplingParams(**{name: [5]})
    else:
        assert name in SamplingParams.__struct_fields__


@pytest.mark.parametrize(
    "kind, table", [(SamplingParams, SAMPLING), (PoolingParams, POOLING), (BeamSearchParams, BEAMS)]
)
def test_fields_without_effect_are_no_fields_of_ours(kind: Any, table: dict[str, Any]) -> None:
    assert not set(table) & set(kind.__struct_fields__)
    needed = (2, 3) if kind is BeamSearchParams else ()
    assert kind(*needed, **dict.fromkeys(table)) == kind(*needed)
    with pytest.raises(TypeError, match="frobnicate"):
        kind(*needed, frobnicate=1)


def test_vllms_errors_are_ours() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(VLLMValidationError, match="temperature"):
            SamplingParams(temperature=value)
        with pytest.raises(ValueError, match="repetition_penalty"):
            SamplingParams(repetition_penalty=value)


# Calls


def test_priorities_are_one_for_all_or_one_each(llm: LLM) -> None:
    for priority in (None, 3, [1, 0]):
        assert len(llm.generate(["abc", "xyz"], GREEDY, priority=priority, use_tqdm=False)) == 2
    for wrong in ([], [0], [0, 0, 0]):
        with pytest.raises(ValueError, match="2 prompts, but"):
            llm.generate(["abc", "xyz"], GREEDY, priority=wrong, use_tqdm=False)
    assert len(llm.generate("abc", GREEDY, priority=[0], use_tqdm=False)) == 1
    assert_idle(llm)


def test_prompts_as_token_ids_in_the_older_form(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)]
    found = llm.generate(prompt_token_ids=[[5, 6], [7]], sampling_params=GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == expected
    assert llm.generate(prompt_token_ids=[7], sampling_params=GREEDY, use_tqdm=False)[0].prompt_token_ids == [7]
    with pytest.raises(ValueError, match="either prompts or prompt_token_ids"):
        llm.generate("abc", prompt_token_ids=[5])
    with pytest.raises(ValueError, match="NoneType"):
        llm.generate()


@pytest.mark.parametrize("name", list(PROMPT))
def test_keys_of_prompts_that_ask_for_nothing(llm: LLM, name: str) -> None:
    plain = llm.generate("abc", GREEDY, use_tqdm=False)[0]
    prompt: Any = {"prompt": "abc", "prompt_token_ids": None, name: None}
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text == plain.outputs[0].text
    with pytest.raises(ValueError, match=f"{name}=.* is not supported by quire: .+"):
        llm.generate({**prompt, name: {"image": 1}}, GREEDY, use_tqdm=False)


def test_outputs_have_vllms_fields(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    for name in ("encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params", "lora_request", "prompt_logprobs"):
        assert getattr(output, name) is None
    assert (output.finished, output.prompt_token_ids, output.num_cached_tokens) == (True, [5, 6, 7], 0)
    assert output.metrics is not None and output.metrics.num_generation_tokens == 4
    for name in ("routed_experts", "sampling_mask", "spec_decode_metrics", "lora_request", "logprobs", "stop_reason"):
        assert getattr(output.outputs[0], name) is None
    assert output.outputs[0].finished()


def test_chats_queued_now_and_collected_later(llm: LLM) -> None:
    messages: Any = [[{"role": "user", "content": "abc"}], [{"role": "user", "content": "xyz"}]]
    expected = [output.outputs[0].text for output in llm.chat(messages, GREEDY, use_tqdm=False)]
    llm.enqueue_chat(messages, GREEDY, lora_request=None, chat_template_content_format="auto")
    found = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.outputs[0].text for output in found] == expected
    with pytest.raises(ValueError, match="lora_request"):
        llm.enqueue_chat(messages, GREEDY, lora_request=1)


def test_scores_are_cosines_of_embeddings(llm: LLM) -> None:
    texts = ["abc", "the world", "xyz"]
    vectors = np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    cosines = vectors @ vectors.T / np.outer(np.linalg.norm(vectors, axis=1), np.linalg.norm(vectors, axis=1))

    def scores(*data: Any) -> list[float]:
        return [output.outputs.score for output in llm.score(*data, use_tqdm=False)]

    assert scores("abc", "xyz") == pytest.approx([cosines[0, 2]], abs=1e-5)
    assert scores("abc", texts) == pytest.approx(cosines[0].tolist(), abs=1e-5)
    assert scores(texts, texts[::-1]) == pytest.approx([cosines[0, 2], 1.0, cosines[2, 0]], abs=1e-5)
    (output,) = llm.score([5, 6], [7], use_tqdm=False)
    assert output.prompt_token_ids == [5, 6, 7]
    for wrong in (([], "abc"), ("abc", []), (texts, texts[:2])):
        with pytest.raises(ValueError, match="score compares"):
            llm.score(*wrong)
    assert_idle(llm)


def test_metrics_under_vllms_names(llm: LLM) -> None:
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    for name, metric in metrics.items():
        if name.startswith("vllm:"):
            assert metric.value == metrics[f"quire:{name[5:]}"].value
    assert "vllm:steps" not in metrics
    tokens = metrics["vllm:iteration_tokens_total"]
    assert tokens.count == tokens.buckets["+Inf"] == sum(tokens.counts)
    assert tokens.buckets["1.0"] <= tokens.buckets["8.0"]
    assert (tokens.sum, tokens.labels) == (tokens.value, {})


def test_what_scripts_read_of_the_model(llm: LLM) -> None:
    model = llm.model_config
    assert model == llm.llm_engine.model_config == llm.llm_engine.get_model_config()
    assert model.max_model_len == 256
    assert (
        model.hf_config.hidden_size == model.embedding_size == len(llm.embed("a", use_tqdm=False)[0].outputs.embedding)
    )
    assert model.get_vocab_size() == model.hf_config.vocab_size
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (1, 1)
    assert set(llm.supported_tasks) == {"generate", "embed"}
    assert llm.reset_prefix_cache(reset_connector=True)
    with pytest.raises(ValueError, match="reset_running_requests"):
        llm.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_that_are_missing_say_why(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"quire has no {name}: .+"):
        getattr(llm, name)
    assert not hasattr(AsyncLLM, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'frobnicate'$"):
        _ = llm.frobnicate


def test_the_generation_config_can_be_overridden(tiny_model: Path) -> None:
    with LLM(tiny_model, override_generation_config={"temperature": 0.25, "max_new_tokens": 3}, **TINY) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.25, 3)
        assert len(llm.generate([5, 6], use_tqdm=False)[0].outputs[0].token_ids) <= 3
    for wrong, told in (({"temperature": -1}, "temperature"), ({"frobnicate": 1}, "frobnicate"), (3, "must map")):
        with pytest.raises(ConfigError, match=f"override_generation_config.*{told}"):
            LLM(tiny_model, override_generation_config=wrong, **TINY)


def test_structured_json_on_one_line_for_all_requests(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    with LLM(tiny_model, structured_outputs_config=grammars, **TINY) as llm:
        params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(json=schema))
        request, _ = llm.llm_engine.inputs.make("0", [5], params, 0.0)
        assert request.params.structured_outputs is not None
        assert request.params.structured_outputs.disable_any_whitespace
        assert not params.structured_outputs.disable_any_whitespace
        assert llm.llm_engine.inputs.make("1", [5], SamplingParams(), 0.0)[0].params.structured_outputs is None


def test_flat_logprobs_read_like_lists_of_dicts(llm: LLM) -> None:
    asked = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 3}
    prompt = [5, 6, 7]
    (plain,) = llm.generate([prompt], SamplingParams(**asked), use_tqdm=False)
    (flat,) = llm.generate([prompt], SamplingParams(**asked, flat_logprobs=True), use_tqdm=False)
    assert isinstance(plain.outputs[0].logprobs, list) and isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    found, expected = flat.prompt_logprobs, plain.prompt_logprobs
    assert isinstance(found, FlatLogprobs) and expected is not None
    assert (len(found), found[0], expected[0]) == (3, {}, None)
    assert list(found[1:]) == expected[1:] == [found[-2], found[-1]]
    assert found.token_ids == [token for position in expected[1:] for token in position or ()]
    assert found.logprobs == [entry.logprob for position in expected[1:] for entry in (position or {}).values()]
    with pytest.raises(IndexError):
        _ = found[3]
    for change in (lambda: found.__setitem__(0, {}), lambda: found.pop(), lambda: found.insert(0, {})):
        with pytest.raises(TypeError, match="only be appended"):
            change()
    streamed = [
        output.outputs[0].logprobs
        for output in llm.stream([prompt], SamplingParams(**asked, flat_logprobs=True, output_kind=DELTA))
    ]
    assert [position for part in streamed for position in part or ()] == plain.outputs[0].logprobs
