"""`LLM.stream`: what each output holds, stop strings in it, and leaving it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from quire import LLM, RequestOutput, RequestOutputKind, SamplingParams
from tests.conftest import assert_idle


def params(kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields}
    return SamplingParams(output_kind=kind, **fields)


def final(llm: LLM, prompt: str, **fields: Any) -> RequestOutput:
    return llm.generate(prompt, params(**fields), use_tqdm=False)[0]


class TestKinds:
    def test_cumulative_outputs_grow_to_the_final_one(self, llm: LLM) -> None:
        expected = final(llm, "abc").outputs[0]
        outputs = list(llm.stream("abc", params()))
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 21))
        for output in outputs:
            assert expected.text.startswith(output.outputs[0].text)
            assert expected.token_ids[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
        assert [output.finished for output in outputs] == [False] * 19 + [True]
        assert outputs[-1].outputs[0].text == expected.text

    def test_deltas_join_to_the_final_one(self, llm: LLM) -> None:
        expected = final(llm, "abc", logprobs=2).outputs[0]
        parts = [output.outputs[0] for output in llm.stream("abc", params(RequestOutputKind.DELTA, logprobs=2))]
        assert "".join(part.text for part in parts) == expected.text
        assert [token for part in parts for token in part.token_ids] == expected.token_ids
        assert [entry for part in parts for entry in part.logprobs or []] == expected.logprobs

    def test_final_only_shows_one(self, llm: LLM) -> None:
        (only,) = llm.stream("abc", params(RequestOutputKind.FINAL_ONLY))
        assert only.finished
        assert only.outputs[0].text == final(llm, "abc").outputs[0].text

    def test_many_prompts_and_kinds_in_one_stream(self, llm: LLM) -> None:
        kinds = list(RequestOutputKind)
        prompts = ["abc", "the world", "x"]
        seen: dict[str, list[RequestOutput]] = {}
        for output in llm.stream(prompts, [params(kind) for kind in kinds]):
            seen.setdefault(output.prompt or "", []).append(output)
        expected = [final(llm, prompt).outputs[0].text for prompt in prompts]
        assert seen["abc"][-1].outputs[0].text == expected[0]
        assert "".join(output.outputs[0].text for output in seen["the world"]) == expected[1]
        assert [output.outputs[0].text for output in seen["x"]] == [expected[2]]

    def test_deltas_of_several_sequences_join_each(self, llm: LLM) -> None:
        asked = params(RequestOutputKind.DELTA, n=3, temperature=1.0, seed=6, ignore_eos=False, max_tokens=40)
        texts = ["", "", ""]
        for output in llm.stream("hello", asked):
            for sample in output.outputs:
                texts[sample.index] += sample.text
        whole = llm.generate("hello", asked, use_tqdm=False)[0]
        assert texts == [sample.text for sample in whole.outputs]


class TestLeaving:
    @pytest.mark.parametrize("how", ["break", "close", "exception", "unread", "unread and closed"])
    def test_leaving_early_frees_everything(self, llm: LLM, how: str) -> None:
        stream = llm.stream(["abc", "the world"], params(max_tokens=100))
        if how == "break":
            for output in stream:
                if len(output.outputs[0].token_ids) > 3:
                    break
            stream.close()  # type: ignore[attr-defined]
        elif how == "close":
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        elif how == "exception":
            with pytest.raises(RuntimeError, match="mine"):
                for _ in stream:
                    raise RuntimeError("mine")
            stream.close()  # type: ignore[attr-defined]
        elif how == "unread and closed":
            stream.close()  # type: ignore[attr-defined]
        del stream
        gc.collect()
        assert_idle(llm)

    def test_leaving_with_a_step_in_flight(self, make_llm: Any) -> None:
        llm = make_llm(pipeline_depth=1)
        for _ in llm.stream(["abc", "the world"], params(max_tokens=100)):
            break
        gc.collect()
        assert_idle(llm)
        assert final(llm, "abc").outputs[0].text

    def test_two_streams_can_be_interleaved(self, llm: LLM) -> None:
        expected = [final(llm, prompt).outputs[0].text for prompt in ("abc", "x")]
        pairs = list(zip(llm.stream("abc", params()), llm.stream("x", params()), strict=True))
        assert [output.outputs[0].text for output in pairs[-1]] == expected

    def test_generate_leaves_an_open_streams_outputs_alone(self, llm: LLM) -> None:
        expected = final(llm, "abc").outputs[0].text
        stream = llm.stream("abc", params(RequestOutputKind.DELTA))
        text = next(stream).outputs[0].text
        assert (
            len(final(llm, "the world", max_tokens=60).outputs[0].token_ids) == 60
        )  # the stream's request ends inside
        assert text + "".join(output.outputs[0].text for output in stream) == expected


class TestStopStrings:
    """The tiny model's greedy text for a prompt is known, so any part of it can serve as a stop string."""

    @pytest.fixture
    def text(self, llm: LLM) -> str:
        return final(llm, "abc", max_tokens=30).outputs[0].text

    @pytest.mark.parametrize("start, length", [(0, 1), (3, 1), (4, 3), (7, 5), (2, 9)])
    def test_the_text_ends_where_the_string_begins(self, llm: LLM, text: str, start: int, length: int) -> None:
        stop = text[start : start + length]
        at = text.index(stop)
        for include in (False, True):
            output = final(llm, "abc", max_tokens=30, stop=stop, include_stop_str_in_output=include).outputs[0]
            assert output.text == text[: at + length if include else at]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            decoded = llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=True)
            shorter = llm.get_tokenizer().decode(output.token_ids[:-1], skip_special_tokens=True)
            assert stop in decoded and stop not in shorter  # the ids end with the token that completed it

    def test_the_string_that_completes_first_wins(self, llm: LLM, text: str) -> None:
        late, early = text[2:12], text[5:8]
        assert final(llm, "abc", max_tokens=30, stop=[late, early]).outputs[0].stop_reason == early

    def test_held_back_text_is_never_shown(self, llm: LLM, text: str) -> None:
        stop = text[9:14]
        at = text.index(stop)
        for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
            shown = ""
            for output in llm.stream("abc", params(kind, max_tokens=30, stop=[stop])):
                new = output.outputs[0].text
                shown = shown + new if kind is RequestOutputKind.DELTA else new
                assert text[:at].startswith(shown)
            assert shown == text[:at]

    def test_the_start_of_a_stop_string_is_shown_at_the_end(self, llm: LLM, text: str) -> None:
        stop = text[-3:] + "#never#"
        outputs = list(llm.stream("abc", params(max_tokens=30, stop=[stop])))
        assert outputs[-1].outputs[0].text == text
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert all(len(o.outputs[0].text) <= max(0, len(text) - len(stop) + 1) for o in outputs[:-1])

    def test_min_tokens_delays_stop_strings(self, llm: LLM, text: str) -> None:
        stop = text[2:4]
        output = final(llm, "abc", max_tokens=30, stop=[stop], min_tokens=12).outputs[0]
        assert len(output.token_ids) > 12
        assert stop in output.text  # the early one was ignored

    @pytest.mark.parametrize("depth", [0, 1])
    def test_tokens_after_the_stop_are_dropped(self, make_llm: Any, text: str, depth: int) -> None:
        llm = make_llm(pipeline_depth=depth)
        stop = text[6:9]
        alone = final(llm, "abc", max_tokens=30, stop=[stop]).outputs[0]
        assert alone.text == text[: text.index(stop)]
        many = llm.generate(["abc", "the world"] * 4, params(max_tokens=30, stop=[stop]), use_tqdm=False)
        assert all(output.outputs[0].token_ids == alone.token_ids for output in many[::2])

    def test_each_sequence_stops_by_itself(self, llm: LLM) -> None:
        fields: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 30}
        free = final(llm, "abc", **fields)
        stopped = final(llm, "abc", stop=["e"], **fields)
        for a, b in zip(free.outputs, stopped.outputs, strict=True):
            assert b.text == a.text.split("e")[0]
            assert b.finish_reason == ("stop" if "e" in a.text else "length")


class TestChat:
    def test_one_conversation_and_many(self, llm: LLM) -> None:
        first = [{"role": "user", "content": "hello"}]
        second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "the world"}]
        (one,) = llm.chat(first, params(), use_tqdm=False)
        assert one.prompt == "<|user|>hello</s><|assistant|>"
        assert one.prompt_token_ids == [2, *llm.get_tokenizer().encode("hello"), 1, 3]
        many = llm.chat([first, second], params(), use_tqdm=False)
        assert many[0].outputs[0].token_ids == one.outputs[0].token_ids
        assert many[1].prompt == "<|user|>hello</s><|assistant|>yes</s><|user|>the world</s><|assistant|>"

    def test_template_options(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hello"}]
        bare = llm.chat(messages, params(), use_tqdm=False, add_generation_prompt=False)
        assert bare[0].prompt == "<|user|>hello</s>"
        own = llm.chat(messages, params(), use_tqdm=False, chat_template="{{ messages[0]['content'] }}!")
        assert own[0].prompt == "hello!"
        begun = [*messages, {"role": "assistant", "content": "yes"}]
        continued = llm.chat(begun, params(), use_tqdm=False, continue_final_message=True)
        assert continued[0].prompt == "<|user|>hello</s><|assistant|>yes"

    def test_a_template_of_the_engines_own(self, make_llm: Any, tmp_path: Any) -> None:
        path = tmp_path / "template.jinja"
        path.write_text("{{ messages[0]['content'] }}?")
        llm = make_llm(chat_template=str(path))
        assert llm.chat([{"role": "user", "content": "x"}], params(), use_tqdm=False)[0].prompt == "x?"

    def test_a_streamed_answer_equals_the_whole_one(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hello"}]
        whole = llm.chat(messages, params(), use_tqdm=False)[0].outputs[0].text
        parts = llm.chat_stream(messages, params(RequestOutputKind.DELTA))
        assert "".join(output.outputs[0].text for output in parts) == whole

    @pytest.mark.parametrize(
        "messages", [[], [[]], [{"role": "wizard", "content": "x"}], [[{"content": "x"}]], [["x"]]], ids=str
    )
    def test_bad_conversations_are_refused(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(ValueError):
            llm.chat(messages, params(), use_tqdm=False)


class TestRealText:
    """The default model: text across tokens, in a chat."""

    def test_a_chat_answers_with_words_and_streams_them(self, smollm: LLM) -> None:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        whole = smollm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].text
        assert "Paris" in whole
        parts = smollm.chat_stream(messages, params(RequestOutputKind.DELTA, ignore_eos=False, max_tokens=12))
        assert "".join(output.outputs[0].text for output in parts) == whole

    def test_a_stop_string_across_tokens(self, smollm: LLM) -> None:
        (free,) = smollm.generate("The quick brown fox", params(max_tokens=12), use_tqdm=False)
        text = free.outputs[0].text
        stop = text[5:14]
        (output,) = smollm.generate("The quick brown fox", params(max_tokens=12, stop=[stop]), use_tqdm=False)
        assert output.outputs[0].text == text[: text.index(stop)]

    def test_a_bad_word_of_several_tokens_is_never_written(self, smollm: LLM) -> None:
        asked = params(max_tokens=6)
        text = smollm.generate("The capital of France is", asked, use_tqdm=False)[0].outputs[0].text
        assert " Paris" in text
        asked.bad_words = ["Paris"]
        text = smollm.generate("The capital of France is", asked, use_tqdm=False)[0].outputs[0].text
        assert " Paris" not in text
