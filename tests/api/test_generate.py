"""`LLM.generate`: what goes in, what comes out, when a request ends."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from quire.errors import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def greedy_tokens(reference: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        with torch.inference_mode():
            ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


class TestPrompts:
    def test_every_form_of_one_prompt_gives_the_same_answer(self, llm: LLM, reference: Any) -> None:
        text = "hello world"
        ids = llm.get_tokenizer().encode(text)
        expected = greedy_tokens(reference, ids, 12)
        forms: list[Any] = [
            text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}, TextPrompt(prompt=text),
            TokensPrompt(prompt_token_ids=ids), {"prompt": text, "prompt_token_ids": ids},
            {"prompt": text, "cache_salt": "s"},
        ]  # fmt: skip
        for form in forms:
            (output,) = llm.generate(form, GREEDY, use_tqdm=False)
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == expected
        assert tokens_of(llm.generate(forms, GREEDY, use_tqdm=False)) == [expected] * len(forms)

    def test_answers_come_in_the_order_of_the_prompts(self, llm: LLM, reference: Any) -> None:
        prompts = ["x" * n for n in (40, 1, 17, 3, 29)]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 30, 1, 9, 4)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, asked, output in zip(prompts, params, outputs, strict=True):
            assert output.prompt == prompt
            assert output.outputs[0].token_ids == greedy_tokens(
                reference, output.prompt_token_ids, asked.max_tokens or 0
            )

    def test_one_params_serves_all_and_a_list_serves_each(self, llm: LLM) -> None:
        assert [len(t) for t in tokens_of(llm.generate(["a", "b"], GREEDY, use_tqdm=False))] == [12, 12]
        each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
        assert [len(t) for t in tokens_of(llm.generate(["a", "b"], each, use_tqdm=False))] == [3, 5]

    def test_no_params_means_the_models_own_defaults(self, llm: LLM) -> None:
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.top_k, default.top_p, default.max_tokens) == (0.6, 40, 0.9, 7)
        assert all(len(tokens) <= 7 for tokens in tokens_of(llm.generate(["a", "b c"], use_tqdm=False)))

    def test_no_prompts_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], GREEDY, use_tqdm=False) == []

    def test_the_callers_params_are_not_changed(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=3)
        before = params.clone()
        llm.generate("a", params, use_tqdm=False)
        assert params == before

    def test_more_prompts_than_rows(self, make_llm: Any, reference: Any) -> None:
        llm = make_llm(max_num_seqs=3)
        outputs = llm.generate([[5 + i] for i in range(10)], GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == [greedy_tokens(reference, [5 + i], 12) for i in range(10)]

    def test_the_prompt_is_cut_from_the_left(self, llm: LLM) -> None:
        ids = list(range(10, 60))
        cut = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=7)
        (output,) = llm.generate(ids, cut, use_tqdm=False)
        assert output.prompt_token_ids == ids[-7:]
        longest = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=-1)
        (output,) = llm.generate([5] * 1000, longest, use_tqdm=False)
        assert len(output.prompt_token_ids) == 255
        assert len(output.outputs[0].token_ids) == 1


class TestOutputs:
    def test_fields_have_vllms_names(self, llm: LLM) -> None:
        (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, logprobs=1), use_tqdm=False)
        names = {field.name for field in dataclasses.fields(output)}
        assert {"request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics",
                "lora_request", "num_cached_tokens"} <= names  # fmt: skip
        sample = output.outputs[0]
        assert isinstance(output, RequestOutput) and isinstance(sample, CompletionOutput)
        assert {"index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason",
                "lora_request"} <= {field.name for field in dataclasses.fields(sample)}  # fmt: skip
        assert sample.finished() and output.finished and sample.index == 0
        assert isinstance(sample.logprobs[0][sample.token_ids[0]], Logprob)

    def test_text_is_the_tokens_decoded(self, llm: LLM) -> None:
        for output in llm.generate(
            ["abc", "the", "x y z"], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
        ):
            tokens = list(output.outputs[0].token_ids)
            if output.outputs[0].finish_reason == "stop":
                tokens = tokens[:-1]
            assert output.outputs[0].text == llm.get_tokenizer().decode(tokens, skip_special_tokens=True)

    def test_metrics_hold_times(self, llm: LLM) -> None:
        begin = time.time()
        (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
        m = output.metrics
        assert m is not None
        assert begin <= m.arrival_time <= time.time()
        assert 0 < m.queued_ts <= m.scheduled_ts <= m.first_token_ts <= m.last_token_ts <= time.monotonic()
        assert m.num_generation_tokens == 12
        assert m.first_token_latency >= m.queue_time >= 0

    def test_cached_tokens_are_counted(self, llm: LLM) -> None:
        prompt = list(range(10, 60))
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 48
        assert (
            llm.generate(prompt[:48], GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
        )  # one token is always computed
        assert llm.reset_prefix_cache() is True
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0

    def test_a_salt_keeps_cached_blocks_apart(self, llm: LLM) -> None:
        ids = list(range(10, 60))

        def hits(salt: str) -> int | None:
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens  # type: ignore[arg-type]

        assert [hits("a"), hits("b"), hits("a"), hits("b"), hits("")] == [0, 0, 48, 48, 0]

    def test_engine_metrics_count(self, make_llm: Any) -> None:
        llm = make_llm()
        llm.generate([[5] * 20, [6] * 30], GREEDY, use_tqdm=False)
        values = {metric.name: metric.value for metric in llm.get_metrics()}
        assert values["quire:prompt_tokens"] == 50
        assert values["quire:generation_tokens"] == 24
        assert values["quire:request_success"] == 2
        assert values["quire:num_requests_running"] == values["quire:num_blocks_used"] == 0


class TestEnds:
    def test_max_tokens(self, llm: LLM) -> None:
        (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)

    @pytest.mark.parametrize("max_tokens", [None, 10_000])
    def test_the_models_length_is_the_end(self, llm: LLM, max_tokens: int | None) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([7] * 200, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 56
        assert output.outputs[0].finish_reason == "length"

    def test_the_end_token_ends_and_stays_out_of_the_text(self, llm: LLM) -> None:
        (free,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
        (ended,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        tokens = list(ended.outputs[0].token_ids)
        assert tokens == list(free.outputs[0].token_ids)[: len(tokens)]
        assert tokens[-1] in (1, 3)  # the model's end token, and the second of its generation config
        assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
        assert len(free.outputs[0].token_ids) == 40

    def test_a_stop_token_is_named_and_kept_in_the_ids(self, llm: LLM) -> None:
        (free,) = llm.generate("abc", GREEDY, use_tqdm=False)
        tokens = list(free.outputs[0].token_ids)
        stop = next(token for i, token in enumerate(tokens) if i >= 4 and token not in tokens[:i])
        at = tokens.index(stop)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        (output,) = llm.generate("abc", params, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens[: at + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert output.outputs[0].text == llm.get_tokenizer().decode(tokens[:at], skip_special_tokens=True)
        params.include_stop_str_in_output = True
        (output,) = llm.generate("abc", params, use_tqdm=False)
        assert output.outputs[0].text == llm.get_tokenizer().decode(tokens[: at + 1], skip_special_tokens=True)

    def test_min_tokens_delays_the_end(self, llm: LLM) -> None:
        ends = SamplingParams(temperature=0, max_tokens=60)
        at = len(llm.generate("hello", ends, use_tqdm=False)[0].outputs[0].token_ids)
        for least in (at - 1, at, at + 5):
            params = SamplingParams(temperature=0, max_tokens=60, min_tokens=least)
            (output,) = llm.generate("hello", params, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            assert len(tokens) >= least
            assert not {1, 3} & set(tokens[:least])  # token number `least` + 1 is the first that may end

    def test_the_smallest_cache_that_holds_a_request_serves_it(self, make_llm: Any) -> None:
        llm = make_llm(num_gpu_blocks_override=2, max_model_len=256)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate([7] * 20, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 13  # 32 slots; the last token needs none


class TestSamples:
    def test_n_sequences_differ_and_repeat_with_the_seed(self, llm: LLM) -> None:
        params = SamplingParams(n=5, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)
        (first,) = llm.generate("hello world", params, use_tqdm=False)
        (second,) = llm.generate("hello world", params, use_tqdm=False)
        assert [sample.index for sample in first.outputs] == list(range(5))
        assert [s.token_ids for s in first.outputs] == [s.token_ids for s in second.outputs]
        assert len({tuple(sample.token_ids) for sample in first.outputs}) == 5

    def test_sequences_are_the_same_when_rows_or_blocks_run_out(self, llm: LLM, make_llm: Any) -> None:
        """Forked, queued one by one, or preempted: sequence i draws the same tokens."""
        params = SamplingParams(n=6, temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
        prompt = list(range(10, 31))
        expected = [list(s.token_ids) for s in llm.generate(prompt, params, use_tqdm=False)[0].outputs]
        few_rows = make_llm(max_num_seqs=2)
        few_blocks = make_llm(num_gpu_blocks_override=7)
        for engine in (few_rows, few_blocks):
            (output,) = engine.generate(prompt, params, use_tqdm=False)
            assert [list(s.token_ids) for s in output.outputs] == expected
        assert few_blocks.llm_engine.core.scheduler.stats.preemptions > 0

    @pytest.mark.parametrize(
        "filters",
        [{"top_p": 0.95}, {"top_n_sigma": 1.5}, {"xtc_probability": 0.5, "xtc_threshold": 0.02, "top_n_sigma": 3.0}],
        ids=str,
    )
    def test_a_seed_gives_the_same_text_in_any_batch(self, llm: LLM, make_llm: Any, filters: dict[str, float]) -> None:
        seeded = SamplingParams(temperature=0.9, seed=123, max_tokens=40, ignore_eos=True, **filters)  # type: ignore[arg-type]
        other = SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True)
        (alone,) = tokens_of(llm.generate("hello world", seeded, use_tqdm=False))
        crowd = ["a", "the world", "hello world", "x" * 9]
        together = llm.generate(crowd, [other, other, seeded, other], use_tqdm=False)
        assert tokens_of(together)[2] == alone
        tight = make_llm(num_gpu_blocks_override=9, block_size=8, max_num_batched_tokens=16, pipeline_depth=1)
        squeezed = tight.generate(crowd, [other, other, seeded, other], use_tqdm=False)
        assert tokens_of(squeezed)[2] == alone
        assert tight.llm_engine.core.scheduler.stats.preemptions > 0

    def test_xtc_with_sequences_logprobs_and_an_early_preemption(self, llm: LLM, make_llm: Any) -> None:
        """Whether top choices are excluded goes by seed, position and sequence; logprobs are those of the model."""
        params = SamplingParams(
            n=4, temperature=1.0, seed=21, max_tokens=16, ignore_eos=True, xtc_probability=1.0, xtc_threshold=0.005,
            logprobs=1,
        )  # fmt: skip
        (output,) = llm.generate("hello world", params, use_tqdm=False)
        expected = [list(sequence.token_ids) for sequence in output.outputs]
        assert len({tuple(tokens) for tokens in expected}) == 4
        entries = [entry for sequence in output.outputs for entry in sequence.logprobs]
        drawn = [entry[token] for entry, token in zip(entries, itertools.chain(*expected), strict=True)]
        assert sum(logprob.rank == 1 for logprob in drawn) < len(drawn) // 8
        tight = make_llm(num_gpu_blocks_override=7, block_size=8, pipeline_depth=1)
        (squeezed,) = tight.generate("hello world", params, use_tqdm=False)
        assert [list(sequence.token_ids) for sequence in squeezed.outputs] == expected
        assert tight.llm_engine.core.scheduler.stats.preemptions > 0
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        same = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, xtc_probability=1.0, top_n_sigma=0.1)
        assert tokens_of(llm.generate("hello", same, use_tqdm=False)) == tokens_of(
            llm.generate("hello", greedy, use_tqdm=False)
        )

    def test_without_seeds_the_engines_seed_decides(self, make_llm: Any) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)

        def texts(seed: int) -> list[list[int]]:
            return tokens_of(make_llm(seed=seed).generate(["a", "a", "b"], params, use_tqdm=False))

        first = texts(0)
        assert first == texts(0) != texts(1)
        assert first[0] != first[1]


class TestLife:
    def test_a_context_manager_frees_everything(self, tiny_model: Path) -> None:
        import gc
        import weakref

        with LLM(tiny_model, dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
            llm.generate("abc", GREEDY, use_tqdm=False)
            worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
            held = [weakref.ref(worker.model), weakref.ref(worker._runner._batch.kv.data)]
            del worker
        gc.collect()
        assert [reference() for reference in held] == [None, None]

    def test_memory_is_freed(self, tiny_model: Path) -> None:
        import gc
        import os

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def use() -> None:
            with LLM(tiny_model, dtype="float32", num_gpu_blocks_override=8192, device="cpu") as llm:
                worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
                worker._runner._batch.kv.data.fill_(1.0)  # touch all 128 MiB

        use()
        gc.collect()
        before = resident()
        for _ in range(3):
            use()
            gc.collect()
        assert resident() - before < 100 * 2**20

    def test_calls_after_shutdown_raise(self, make_llm: Any) -> None:
        llm = make_llm()
        stream = llm.stream("abc", GREEDY)
        next(stream)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate("abc", GREEDY, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in stream] == ["abort"]

    def test_the_model_path_and_tokenizer(self, llm: LLM, tiny_model: Path) -> None:
        assert llm.model_path == tiny_model.resolve()
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("hello the world")) == "hello the world"

    def test_a_path_object_names_a_model(self, tiny_model: Path) -> None:
        with LLM(tiny_model, dtype="float32", num_gpu_blocks_override=8, device="cpu") as llm:
            assert llm.model_path == tiny_model.resolve()

    def test_without_a_tokenizer_ids_go_in_and_out(self, make_llm: Any, reference: Any) -> None:
        llm = make_llm(skip_tokenizer_init=True)
        (output,) = llm.generate([[9, 10, 11]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy_tokens(reference, [9, 10, 11], 12)
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate([[9]], SamplingParams(stop=["x"]), use_tqdm=False)

    @pytest.mark.parametrize("asked", ["auto", None, -1])
    def test_the_longest_length_is_what_fits(self, make_llm: Any, asked: Any) -> None:
        llm = make_llm(num_gpu_blocks_override=4, max_model_len=asked)
        assert llm.llm_engine.info.max_model_len == 65  # 4 blocks of 16; the last token needs no slot
        (output,) = llm.generate(
            [7] * 60, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 5


def test_the_usual_offline_script_runs_with_only_the_import_changed(tiny_model: Path, capsys: Any) -> None:
    script = """
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    # Create an LLM.
    llm = LLM(model="MODEL", gpu_memory_utilization=0.5, max_model_len=128, trust_remote_code=False,
              tensor_parallel_size=1, enforce_eager=True, dtype="float32", swap_space=4, kv_cache_memory_bytes=1 << 20)
    # Generate texts from the prompts.
    # The output is a list of RequestOutput objects
    # that contain the prompt, generated text, and other information.
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
"""
    changed = script.replace("from vllm import", "from quire import").replace("MODEL", str(tiny_model))
    exec(compile(changed, "offline.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.count("Prompt:    ") == 4
    assert "'The capital of France is'" in printed


def test_a_bad_word_is_tokenized_once_for_all_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, bad_words=["worldly", "worldly", "sea"])
    inputs = llm.llm_engine.inputs
    first, _ = inputs.make("a", [5], params, 0.0)
    texts = ["worldly", " worldly", "sea", " sea"]
    assert first.bad_words == [inputs.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    monkeypatch.setattr(inputs, "encode", None)
    again, _ = inputs.make("b", [5], params, 0.0)
    assert again.bad_words == first.bad_words
