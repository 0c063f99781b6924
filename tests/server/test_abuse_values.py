"""Values that crashed other servers: each is refused by name or answered, quickly, without harm to the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.attacked_server import AttackedServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE = "/tokenize"
USER = [{"role": "user", "content": "abc"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": "abc", "max_tokens": 2},
    EMBED: {"input": "abc"},
    RESPONSES: {"input": "abc", "max_output_tokens": 16},
    MESSAGES: {"model": "tiny", "messages": USER, "max_tokens": 2},
    TOKENIZE: {"prompt": "abc"},
}
QUICK = 10.0
"""Seconds: long enough for a busy machine; the worst of these values would otherwise never finish."""


def written(path: str, field: str, value: str) -> bytes:
    """A body in which one field's value is exactly these characters, valid JSON or not."""
    base = json.dumps({name: given for name, given in BASE[path].items() if name != field})
    return f'{base[:-1]}, "{field}": {value}}}'.encode()


def refused(attacked: AttackedServer, path: str, body: Any, statuses: tuple[int, ...] = (400,)) -> str:
    """The error message of a request that must be refused."""
    begin = time.monotonic()
    answer = attacked.post(path, body)
    assert answer.status_code in statuses, answer.text[:400]
    assert time.monotonic() - begin < QUICK
    error = answer.json()["error"]
    assert error["message"] and "Traceback" not in error["message"] and len(error["message"]) < 2000
    return str(error["message"])


class TestNumbers:
    FIELDS = (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout",
        "top_n_sigma", "xtc_probability", "xtc_threshold",
    )  # fmt: skip

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_values_that_are_not_numbers(self, attacked: AttackedServer, path: str, value: str) -> None:
        for field in self.FIELDS:
            refused(attacked, path, written(path, field, value))

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_negative_numbers(self, attacked: AttackedServer, path: str) -> None:
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "timeout",
            "n",
            "max_tokens",
            "min_tokens",
        ):
            assert field in refused(attacked, path, written(path, field, "-1"))
        assert "top_k" in refused(attacked, path, written(path, "top_k", "-2"))

    def test_negative_zero_is_zero(self, attacked: AttackedServer) -> None:
        for field in ("temperature", "min_p", "presence_penalty", "top_k", "min_tokens"):
            for value in ("-0", "-0.0", "-0e99"):
                answer = attacked.post(TEXT, written(TEXT, field, value))
                # Whether -0.0 is an integer is debatable.
                is_whole = value != "-0" and field in ("top_k", "min_tokens")
                assert answer.status_code in ((200, 400) if is_whole else (200,)), answer.text

    @pytest.mark.parametrize("digits", ["9" * 20, "9" * 400, "-" + "9" * 400, "9" * 5000])
    def test_integers_of_any_length(self, attacked: AttackedServer, digits: str) -> None:
        for path, field in (
            (TEXT, "n"), (TEXT, "max_tokens"), (TEXT, "logprobs"), (TEXT, "seed"), (TEXT, "top_k"), (TEXT, "priority"),
            (TEXT, "min_tokens"), (TEXT, "truncate_prompt_tokens"), (CHAT, "top_logprobs"), (EMBED, "dimensions"),
            (EMBED, "truncate_prompt_tokens"), (RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens"),
        ):  # fmt: skip
            refused(attacked, path, written(path, field, digits))
        for field in ("stop_token_ids", "allowed_token_ids", "prompt"):
            refused(attacked, TEXT, written(TEXT, field, f"[{digits}]"))
        refused(attacked, TEXT, written(TEXT, "logit_bias", f'{{"{digits}": 1}}'))
        refused(attacked, "/detokenize", f'{{"tokens": [{digits}]}}'.encode())

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"x"', "[]"])
    def test_numbers_in_lists_and_maps(self, attacked: AttackedServer, value: str) -> None:
        refused(attacked, TEXT, written(TEXT, "logit_bias", f'{{"5": {value}}}'))
        refused(attacked, TEXT, written(TEXT, "stop_token_ids", f"[{value}]"))
        refused(attacked, TEXT, written(TEXT, "vllm_xargs", f'{{"a": {value}'))

    def test_a_logit_bias_is_clamped_to_its_range(self, attacked: AttackedServer) -> None:
        assert attacked.post(TEXT, written(TEXT, "logit_bias", '{"5": 1e300, "6": -1e300}')).status_code == 200


class TestSizes:
    def test_a_huge_n(self, attacked: AttackedServer) -> None:
        assert "n must be" in refused(attacked, TEXT, {**BASE[TEXT], "n": 10**6})
        assert "n must be" in refused(attacked, CHAT, {**BASE[CHAT], "n": 10**6})
        assert "at most" in refused(attacked, TEXT, {**BASE[TEXT], "n": 129, "prompt": ["a"] * 1000})

    def test_giant_lists_of_prompts(self, attacked: AttackedServer) -> None:
        assert "at most" in refused(attacked, TEXT, {**BASE[TEXT], "prompt": ["a"] * 200_000})
        assert "at most" in refused(attacked, TEXT, {**BASE[TEXT], "prompt": [[5]] * 20_000})
        assert "more than 262144 values" in refused(attacked, TEXT, {**BASE[TEXT], "prompt": [[5]] * 200_000})
        assert "at most" in refused(attacked, EMBED, {"input": ["a"] * 200_000})
        refused(attacked, CHAT, {"messages": USER * 50_000})
        refused(attacked, TOKENIZE, {"messages": []})

    def test_too_many_prompts_times_sequences(self, attacked: AttackedServer) -> None:
        body = {"prompt": ["abc"] * 1000, "n": 100, "max_tokens": 100, "timeout": 1}
        assert "100000 sequences" in refused(attacked, TEXT, body)

    def test_a_prompt_of_megabytes(self, attacked: AttackedServer) -> None:
        """It is tokenized outside the event loop: other requests are served meanwhile."""
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(attacked.post(TEXT, {"prompt": "the world " * 100_000}))
        )
        thread.start()
        longest = 0.0
        while thread.is_alive():
            begin = time.monotonic()
            assert attacked.request("GET", "/version").status_code == 200
            longest = max(longest, time.monotonic() - begin)
        assert answers[0].status_code == 400 and "maximum context length" in answers[0].text
        assert longest < 3

    def test_a_list_of_a_million_tokens(self, attacked: AttackedServer) -> None:
        assert "maximum context length" in refused(attacked, TEXT, {"prompt": [5] * 200_000})
        assert "more than 262144 values" in refused(attacked, TEXT, {"prompt": [5] * 1_000_000})

    @pytest.mark.parametrize("token", [-1, 116, 128, 2**31, 2**63, 2**64])
    def test_token_ids_out_of_range(self, attacked: AttackedServer, token: int) -> None:
        """The tokenizer has 116 tokens, the model has rows for 128."""
        outside = token != 116
        for field in ("prompt", "stop_token_ids", "allowed_token_ids"):
            answer = attacked.post(TEXT, {**BASE[TEXT], field: [token]})
            assert answer.status_code == (400 if outside else 200), (field, answer.text[:400])
        assert attacked.post(TEXT, {**BASE[TEXT], "logit_bias": {str(token): 1}}).status_code == (
            400 if outside else 200
        )
        assert attacked.post(EMBED, {"input": [token]}).status_code == (400 if outside else 200)

    def test_long_lists_in_the_small_fields(self, attacked: AttackedServer) -> None:
        for field, value in (
            ("stop", ["x" * 100_000] * 100), ("stop", ["x" * 1_000_000]), ("bad_words", ["the world"] * 100_000),
            ("stop_token_ids", [5] * 200_000), ("allowed_token_ids", list(range(5)) * 40_000),
            ("logit_bias", {str(i): 1 for i in range(100_000)}),
        ):  # fmt: skip
            begin = time.monotonic()
            assert attacked.post(TEXT, {**BASE[TEXT], field: value}).status_code in (200, 400, 413), field
            assert time.monotonic() - begin < QUICK
        for field in ("stop_token_ids", "allowed_token_ids"):
            assert "more than 262144 values" in refused(attacked, TEXT, {**BASE[TEXT], field: [5] * 300_000})
        for words in (["the world"] + [str(i) for i in range(200)], ["the world" * 1000]):
            assert "at most" in refused(attacked, TEXT, {**BASE[TEXT], "bad_words": words})

    def test_long_names(self, attacked: AttackedServer) -> None:
        long = "x" * 100_000
        for body in ({"model": long}, {"request_id": long}, {"service_tier": long}):
            assert len(refused(attacked, TEXT, {**BASE[TEXT], **body}, (400, 404))) < 2000
        unknown = attacked.post(TEXT, {**BASE[TEXT], long: 1})
        assert unknown.status_code == 200 and len(unknown.headers["x-quire-ignored"]) == 64
        for field in ("user", "cache_salt"):
            assert attacked.post(TEXT, {**BASE[TEXT], field: long[:512]}).status_code == 200, field
            answer = attacked.post(TEXT, {**BASE[TEXT], field: long})
            assert answer.status_code in (200, 400) and len(answer.content) < 2000, field
        assert attacked.post(TEXT, BASE[TEXT], x_tenant=long[:1000], x_request_id=long[:1000]).status_code == 200


class TestJson:
    @pytest.mark.parametrize("path", [CHAT, TEXT, EMBED, RESPONSES, MESSAGES, TOKENIZE, "/detokenize"])
    @pytest.mark.parametrize("depth", [70, 900, 100_000])
    def test_deep_bodies(self, attacked: AttackedServer, path: str, depth: int) -> None:
        for opens, closes in (("[", "]"), ('{"a":', "}")):
            deep = opens * depth + "1" + closes * depth
            refused(attacked, path, deep.encode())
            for field in BASE.get(path, {"tokens": 1}):
                base = json.dumps({name: value for name, value in BASE.get(path, {}).items() if name != field})
                refused(attacked, path, f'{base[:-1]}{", " if len(base) > 2 else ""}"{field}": {deep}}}'.encode())

    @pytest.mark.parametrize("depth", [70, 250, 900])
    def test_deeply_nested_values_in_untyped_fields(self, attacked: AttackedServer, depth: int) -> None:
        deep = '{"a":' * depth + "1" + "}" * depth
        places = [
            (CHAT, "metadata", deep), (CHAT, "vllm_xargs", deep), (CHAT, "chat_template_kwargs", deep),
            (CHAT, "documents", f"[{deep}]"), (CHAT, "messages", f'[{{"role": "user", "content": [{deep}]}}]'),
            (CHAT, "messages", f'[{{"role": "user", "content": [{{"type": "text", "text": "a", "x": {deep}}}]}}]'),
            (CHAT, "tools", f'[{{"function": {{"name": "f", "parameters": {deep}}}}}]'),
            (CHAT, "response_format", f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'),
            (CHAT, "response_format", f'{{"type": "structural_tag", "format": {deep}}}'),
            (CHAT, "response_format", f'{{"type": "structural_tag", "structures": [{deep}], "triggers": ["a"]}}'),
            (CHAT, "structured_outputs", f'{{"json": {deep}}}'),
            (CHAT, "structured_outputs", f'{{"structural_tag": {deep}}}'),
            (RESPONSES, "metadata", deep), (RESPONSES, "input", f"[{deep}]"),
            (RESPONSES, "tools", f'[{{"type": "function", "name": "f", "parameters": {deep}}}]'),
            (RESPONSES, "text", f'{{"format": {{"type": "json_schema", "name": "a", "schema": {deep}}}}}'),
            (MESSAGES, "tools", f'[{{"name": "f", "input_schema": {deep}}}]'),
            (MESSAGES, "messages", f'[{{"role": "user", "content": [{deep}]}}]'),
            (MESSAGES, "messages", '[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", '
             f'"input": {deep}}}]}}, {{"role": "user", "content": "a"}}]'),
        ]  # fmt: skip
        for path, field, value in places:
            refused(attacked, path, written(path, field, value))
        ignored = attacked.post(MESSAGES, written(MESSAGES, "metadata", deep))
        assert (ignored.status_code, ignored.headers["x-quire-ignored"]) == (200, "metadata.a")
        # Schemas that come as text are parsed only by the process for grammars; annotations are not parsed at all.
        schema = f'{{"json": {json.dumps(deep)}}}'
        assert attacked.post(CHAT, written(CHAT, "structured_outputs", schema)).status_code in (200, 400)
        messages = (
            f'[{{"role": "assistant", "content": "a", "annotations": [{deep}]}}, {{"role": "user", "content": "a"}}]'
        )
        assert attacked.post(CHAT, written(CHAT, "messages", messages)).status_code in (200, 400)

    def test_wide_schemas(self, attacked: AttackedServer) -> None:
        """Bombs: small to write, large to expand."""
        twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "null"}}
        nested: dict[str, Any] = {"type": "string"}
        for _ in range(12):
            nested = {"type": "array", "items": nested, "minItems": 50, "maxItems": 50}
        many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
        loops = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        for schema in ({"$defs": twice, "$ref": "#/$defs/d0"}, nested, many, loops, {"enum": ["x" * 1000] * 20_000}):
            begin = time.monotonic()
            answer = attacked.post(TEXT, {**BASE[TEXT], "structured_outputs": {"json": schema}})
            assert answer.status_code in (200, 400, 413), answer.text[:400]
            assert time.monotonic() - begin < 2 * QUICK
        assert attacked.post(TEXT, {**BASE[TEXT], "structured_outputs": {"choice": ["a", "b"]}}).status_code == 200

    def test_a_duplicate_key_counts_once(self, attacked: AttackedServer) -> None:
        body = b'{"prompt": "abc", "max_tokens": 1, "max_tokens": 3, "ignore_eos": true}'
        answer = attacked.post(TEXT, body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        refused(attacked, TEXT, b'{"prompt": "abc", "max_tokens": 3, "max_tokens": -3}')

    @pytest.mark.parametrize(
        "text",
        [b"\\ud800", b"\\udfff", b"\\ud800\\ud800", b"a\\udc00b", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80",
         b"\x00"],
        ids=repr,
    )  # fmt: skip
    def test_text_that_is_not_valid_unicode(self, attacked: AttackedServer, text: bytes) -> None:
        quoted = b'"' + text + b'"'
        for path, body in (
            (CHAT, b'{"messages": [{"role": "user", "content": %b}]}' % quoted),
            (CHAT, b'{"messages": [{"role": %b, "content": "a"}]}' % quoted),
            (TEXT, b'{"prompt": %b}' % quoted),
            (TEXT, b'{"prompt": "a", "stop": %b}' % quoted),
            (TEXT, b'{"prompt": "a", "structured_outputs": {"regex": %b}}' % quoted),
            (TEXT, b'{"prompt": "a", %b: 1}' % quoted),
            (EMBED, b'{"input": %b}' % quoted),
            (RESPONSES, b'{"input": %b}' % quoted),
            (TOKENIZE, b'{"prompt": %b}' % quoted),
        ):
            refused(attacked, path, body)

    def test_null_bytes_in_text_are_accepted(self, attacked: AttackedServer) -> None:
        for text in ("\0", "a\0b", "\0" * 100, "\x01\x1f\x7f", "\u202e\ufeff\uffff", "👩\u200d👩" * 20):
            assert attacked.post(TEXT, {"prompt": "a" + text, "max_tokens": 1}).status_code == 200
            chat = {"messages": [{"role": "user", "content": "a" + text}], "max_tokens": 1}
            assert attacked.post(CHAT, chat).status_code == 200
            assert attacked.post(TEXT, {"prompt": "a", "max_tokens": 1, "stop": text}).status_code == 200
        assert (
            attacked.post(TEXT, {"prompt": "a", "max_tokens": 1, "cache_salt": "\0\0", "user": "\0"}).status_code == 200
        )

    @pytest.mark.parametrize(
        "body",
        [b"", b" ", b"{", b"}", b'{"prompt"', b'{"prompt": "a"', b"\x00" * 100, b"[" * 10, b"NaN", b"{}{}", b"// a"],
    )
    def test_bodies_that_are_not_json(self, attacked: AttackedServer, body: bytes) -> None:
        for path in (*BASE, "/detokenize"):
            refused(attacked, path, body)


class TestPatterns:
    """Grammars that never finish compiling fail their own request and no other."""

    @pytest.mark.parametrize(
        "regex",
        [
            "(a+)+$", "(a|a)*b", "(.*a){30}", "((a{0,99}){0,99}){0,99}", "a{1000000}", "(a?){500}a{500}", "(", "[",
            "a**", "(?=a)b", r"(a)\1", "\\", "[z-a]", "(" * 5000 + "a" + ")" * 5000, "x" * 1_000_000,
            "(a|b|ab)*(a|b|ab)*c", "[\\w\\W]{0,5000}[^\\n]{0,5000}",
        ],
        ids=lambda regex: regex[:24],
    )  # fmt: skip
    def test_expensive_regexes(self, attacked: AttackedServer, regex: str) -> None:
        begin = time.monotonic()
        answer = attacked.post(TEXT, {"prompt": "abc", "max_tokens": 20, "structured_outputs": {"regex": regex}})
        assert answer.status_code in (200, 400), answer.text[:400]
        assert time.monotonic() - begin < 2 * QUICK

    def test_other_requests_are_served_meanwhile(self, attacked: AttackedServer) -> None:
        slow = {"prompt": "abc", "max_tokens": 20, "structured_outputs": {"regex": "((a{0,300}){0,300}){0,300}"}}
        thread = threading.Thread(target=attacked.post, args=(TEXT, slow))
        thread.start()
        times = []
        while thread.is_alive():
            begin = time.monotonic()
            assert attacked.post(TEXT, BASE[TEXT]).status_code == 200
            times.append(time.monotonic() - begin)
        assert max(times, default=0.0) < 2

    @pytest.mark.parametrize(
        "grammar",
        ["root ::= root", "root ::= root root", 'root ::= "a" root', "root ::= ", "x ::= y", "root ::= (" * 500, "\0"],
        ids=lambda grammar: grammar[:16],
    )
    def test_expensive_grammars(self, attacked: AttackedServer, grammar: str) -> None:
        answer = attacked.post(TEXT, {"prompt": "abc", "max_tokens": 4, "structured_outputs": {"grammar": grammar}})
        assert answer.status_code in (200, 400), answer.text[:400]

    def test_more_grammars_than_the_cache_holds(self, attacked: AttackedServer) -> None:
        for i in range(40):
            constraint = {"regex": f"[a-z]{{1,{i + 2}}}x{i}"}
            assert (
                attacked.post(TEXT, {"prompt": "abc", "max_tokens": 1, "structured_outputs": constraint}).status_code
                == 200
            )


class TestTemplates:
    """With --trust-request-chat-template: a request may bring a template, within limits."""

    @pytest.mark.parametrize(
        "template",
        [
            "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ 'a' * 10**9 }}",
            "{{ 10 ** (10 ** 10) }}",
            "{% set n = namespace(x=['a' * 1000]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{{ ('%s' * 99999999) % messages }}",
            "{{ '%099999999d' % 1 }}",
            "{{ '{:>999999999}'.format('a') }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os }}",
            "{{ raise_exception('no') }}",
            "{% " * 20_000,
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "a" * 2_000_000,
        ],
        ids=lambda template: template[:32],
    )
    def test_templates_are_bounded(self, attacked: AttackedServer, template: str) -> None:
        for path in (CHAT, TOKENIZE):
            refused(attacked, path, {"messages": USER, "chat_template": template}, (400, 413))

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__ }}", "{{ self.__dict__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ messages|attr('__class__') }}",
            "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}", "{{ namespace.__init__ }}",
            "{{ lipsum.__globals__ }}", "{{ messages.append('x') }}", "{{ tools.__getattribute__('x') }}",
        ],
    )  # fmt: skip
    def test_templates_cannot_reach_server_internals(self, attacked: AttackedServer, template: str) -> None:
        answer = attacked.post(TOKENIZE, {"messages": USER, "chat_template": template, "return_token_strs": True})
        assert answer.status_code in (200, 400)
        if answer.status_code == 200:
            assert "".join(answer.json()["token_strs"]) in ("", "None"), answer.text[:400]

    def test_a_path_is_never_opened(self, attacked: AttackedServer) -> None:
        for path in ("/etc/passwd", "../../../etc/passwd", "file:///etc/passwd"):
            body = {"messages": USER, "chat_template": path, "return_token_strs": True}
            assert "chat_template" in refused(attacked, TOKENIZE, body)
            answer = attacked.post(TOKENIZE, {**body, "chat_template": path + "{# #}"})
            assert answer.status_code == 200 and "".join(answer.json()["token_strs"]) == path

    @pytest.mark.parametrize(
        "name",
        ["messages", "chat_template", "tokenize", "add_generation_prompt", "tools", "bos_token", "raise_exception",
         "range", "self", "__class__", "_", "environment", "conversation", "return_dict", "a b", ""],
    )  # fmt: skip
    def test_template_variables_cannot_replace_reserved_ones(self, attacked: AttackedServer, name: str) -> None:
        for path in (CHAT, TOKENIZE):
            message = refused(attacked, path, {"messages": USER, "chat_template_kwargs": {name: "x"}})
            assert "chat_template_kwargs" in message


@contextmanager
def listener() -> Iterator[tuple[int, list[Any]]]:
    """A port that records connections."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def wait() -> None:
            while server.fileno() >= 0:
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                came.append(address)
                connection.close()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        yield server.getsockname()[1], came
        time.sleep(0.2)
    thread.join(5)


def test_no_url_in_a_request_is_fetched(attacked: AttackedServer) -> None:
    with listener() as (port, came):
        for url in (
            f"http://127.0.0.1:{port}/a.png", f"https://127.0.0.1:{port}/a.png", f"http://localhost:{port}/a.png",
            f"http://0x7f000001:{port}/", f"http://[::ffff:127.0.0.1]:{port}/", f"http://a@127.0.0.1:{port}/",
            f"//127.0.0.1:{port}", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd",
            "data:image/png;base64,iVBORw0KGgo=",
        ):  # fmt: skip
            for part in (
                {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url},
                {"type": "input_image", "image_url": url}, {"type": "video_url", "video_url": {"url": url}},
                {"type": "audio_url", "audio_url": {"url": url}}, {"type": "file", "file": {"file_data": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            ):  # fmt: skip
                refused(attacked, CHAT, {"messages": [{"role": "user", "content": [part]}]})
                refused(attacked, RESPONSES, {"input": [{"role": "user", "content": [part]}]})
            source = {"type": "url", "url": url}
            refused(
                attacked,
                MESSAGES,
                {**BASE[MESSAGES], "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
            )
            tools = [{"type": "mcp", "server_label": "a", "server_url": url}]
            left_out = attacked.post(RESPONSES, {"input": "a", "max_output_tokens": 16, "tools": tools})
            assert (left_out.status_code, left_out.headers["x-quire-ignored"]) == (200, "tools[].mcp")
            refused(attacked, CHAT, {"messages": USER, "web_search_options": {"user_location": url}})
        schema = {"$ref": f"http://127.0.0.1:{port}/schema.json"}
        assert attacked.post(TEXT, {**BASE[TEXT], "structured_outputs": {"json": schema}}).status_code in (200, 400)
        assert attacked.post(TEXT, {**BASE[TEXT], "model": f"http://127.0.0.1:{port}/m"}).status_code == 404
    assert came == []
