"""SamplingParams: what is refused, with which message, and how accepted values are normalized."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from quire.errors import ValidationError
from quire.messages.sampling import (
    LOWEST_TEMPERATURE,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID,
    RequestOutputKind,
    SamplingParams,
)

NAN, INF = math.nan, math.inf
BAD: list[tuple[str, Any, str, str]] = [
    ("n", 0, "0", "from 1 to 16384"),
    ("n", MAX_N + 1, "16385", "from 1 to 16384"),
    ("n", 1.5, "1.5", "from 1 to 16384"),
    ("n", True, "True", "from 1 to 16384"),
    ("n", "2", "'2'", "from 1 to 16384"),
    ("presence_penalty", -2.1, "-2.1", "[-2, 2]"),
    ("presence_penalty", 2.1, "2.1", "[-2, 2]"),
    ("presence_penalty", NAN, "nan", "[-2, 2]"),
    ("frequency_penalty", -2.1, "-2.1", "[-2, 2]"),
    ("frequency_penalty", 2.1, "2.1", "[-2, 2]"),
    ("repetition_penalty", 0.0, "0.0", "[0.01, 100]"),
    ("repetition_penalty", 5e-324, "5e-324", "[0.01, 100]"),
    ("repetition_penalty", INF, "inf", "[0.01, 100]"),
    ("repetition_penalty", 10**400, "1000", "[0.01, 100]"),
    ("temperature", -0.1, "-0.1", "[0, 100]"),
    ("temperature", 100.1, "100.1", "[0, 100]"),
    ("temperature", NAN, "nan", "[0, 100]"),
    ("temperature", INF, "inf", "[0, 100]"),
    ("temperature", 10**400, "1000", "[0, 100]"),
    ("temperature", "hot", "'hot'", "[0, 100]"),
    ("temperature", True, "True", "[0, 100]"),
    ("temperature", None, "None", "[0, 100]"),
    ("top_p", 0.0, "0.0", "(0, 1]"),
    ("top_p", 1.01, "1.01", "(0, 1]"),
    ("top_p", NAN, "nan", "(0, 1]"),
    ("top_k", -2, "-2", "at least -1"),
    ("top_k", 0.5, "0.5", "at least -1"),
    ("min_p", -0.1, "-0.1", "[0, 1]"),
    ("min_p", 1.1, "1.1", "[0, 1]"),
    ("top_n_sigma", -1.0, "-1.0; 0 turns it off", "[0, 100]"),
    ("xtc_probability", 1.5, "1.5", "[0, 1]"),
    ("xtc_threshold", -0.1, "-0.1", "[0, 1]"),
    ("min_tokens", -1, "-1", "at least 0"),
    ("max_tokens", 0, "0", "at least 1"),
    ("max_tokens", -5, "-5", "at least 1"),
    ("max_tokens", 2.0, "2.0", "at least 1"),
    ("seed", 2**64, "18446744073709551616", "18446744073709551615"),
    ("seed", -(2**63) - 1, "-9223372036854775809", "-9223372036854775808"),
    ("seed", "x", "'x'", "integer"),
    ("logprobs", -2, "-2", "at least -1"),
    ("prompt_logprobs", -2, "-2", "at least -1"),
    ("truncate_prompt_tokens", 0, "got 0", "at least 1"),
    ("truncate_prompt_tokens", -2, "-2", "at least -1"),
    ("stop", [""], "''", "non-empty"),
    ("stop", "", "''", "non-empty"),
    ("stop", [3], "3", "non-empty"),
    ("stop", 3, "3", "list"),
    ("bad_words", [""], "''", "non-empty"),
    ("bad_words", 3, "3", "list"),
    ("stop_token_ids", [-1], "-1", "from 0"),
    ("stop_token_ids", [1.0], "1.0", "from 0"),
    ("stop_token_ids", [2**31], str(2**31), str(MAX_TOKEN_ID)),
    ("stop_token_ids", 7, "7", "list"),
    ("stop_token_ids", "12", "'12'", "list"),
    ("allowed_token_ids", [], "empty", "no token could ever be sampled"),
    ("allowed_token_ids", [-4], "-4", "from 0"),
    ("logit_bias", {-1: 1.0}, "-1", "from 0"),
    ("logit_bias", {"5": 1.0}, "'5'", "from 0"),
    ("logit_bias", {5: NAN}, "nan", "finite"),
    ("logit_bias", {5: INF}, "inf", "finite"),
    ("logit_bias", {5: "big"}, "'big'", "finite"),
    ("logit_bias", [5], "[5]", "map"),
    ("output_kind", 1, "1", "RequestOutputKind"),
]


@pytest.mark.parametrize(("field", "value", "named", "limit"), BAD, ids=lambda value: str(value)[:24])
def test_a_bad_value_is_refused_with_the_value_and_the_limit(field: str, value: Any, named: str, limit: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.parameter == field
    message = str(caught.value)
    assert field in message and limit in message and named in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", MAX_N),
        ("presence_penalty", -2),
        ("presence_penalty", 2.0),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("temperature", 2),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 1.0),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("logprobs", -1),
        ("logprobs", 0),
        ("prompt_logprobs", 5),
        ("truncate_prompt_tokens", -1),
        ("truncate_prompt_tokens", 1),
        ("stop_token_ids", [0, MAX_TOKEN_ID]),
        ("logit_bias", {0: -1000.0}),
    ],
)
def test_limits_themselves_are_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_defaults_match_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.is_greedy and not params.has_penalties and params.stop_strings == []


def test_greedy_ignores_filters() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=7, min_p=0.2)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_a_temperature_near_zero_is_raised_but_stays_random() -> None:
    params = SamplingParams(temperature=0.0001, top_p=0.5)
    assert (params.temperature, params.top_p, params.is_greedy) == (LOWEST_TEMPERATURE, 0.5, False)
    assert SamplingParams(temperature=0.5).temperature == 0.5


def test_seed_minus_one_means_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_several_greedy_sequences_are_refused() -> None:
    with pytest.raises(ValidationError, match="n must be 1 with temperature 0, got 3"):
        SamplingParams(n=3, temperature=0)


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(ValidationError, match=r"min_tokens \(9\) is above max_tokens \(4\)"):
        SamplingParams(min_tokens=9, max_tokens=4)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_stop_strings_need_text_and_have_a_limit() -> None:
    with pytest.raises(ValidationError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ValidationError, match=f"{MAX_STOP_STRINGS + 1} stop strings given; at most {MAX_STOP_STRINGS}"):
        SamplingParams(stop=[str(i) for i in range(MAX_STOP_STRINGS + 1)])


def test_one_stop_string_becomes_a_list_and_an_empty_list_none() -> None:
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop=[]).stop is None
    assert SamplingParams(stop_token_ids=[5, 5, 3, 5]).stop_token_ids == [5, 3]
    assert SamplingParams(stop_token_ids=[]).stop_token_ids is None


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_any_penalty_counts(field: str) -> None:
    assert SamplingParams(**{field: 1.5}).has_penalties


def test_from_optional_takes_none_for_a_default_except_for_max_tokens() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, stop=None, max_tokens=None)
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 0.5, None)
    assert SamplingParams.from_optional() == SamplingParams()


def test_from_optional_clamps_biases_and_takes_json_keys() -> None:
    params = SamplingParams.from_optional(logit_bias={"5": 1000, "7": -1000.0, 9: 3})
    assert params.logit_bias == {5: 100.0, 7: -100.0, 9: 3.0}


@pytest.mark.parametrize("bias", [{"five": 1}, {5: "much"}, {5: None}, [5], {5: 10**400}])
def test_from_optional_refuses_invalid_biases(bias: Any) -> None:
    with pytest.raises(ValidationError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias=bias)


def full() -> SamplingParams:
    return SamplingParams(
        temperature=0.7,
        stop=["a"],
        bad_words=["b"],
        stop_token_ids=[3],
        allowed_token_ids=[4],
        logit_bias={5: 1.0},
        extra_args={"deep": [1]},
    )


def test_many_ids_are_checked_together_and_a_wrong_one_among_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*range(10_000)]
    with pytest.raises(ValidationError, match=r"got 2147483648"):
        SamplingParams(allowed_token_ids=[*ids, 2**31])
    with pytest.raises(ValidationError, match=r"got True"):
        SamplingParams(logit_bias={**dict.fromkeys(ids[2:], 1.0), True: 1.0})
    checked: list[Any] = []
    monkeypatch.setattr("quire.messages.sampling.check_integer", lambda *arguments: checked.append(arguments))
    params = SamplingParams(allowed_token_ids=ids, logit_bias=dict.fromkeys(ids, 1.0)).clone()
    assert (params.allowed_token_ids, [*(params.logit_bias or ())]) == (ids, ids)
    assert len(checked) < 100


def test_a_clone_shares_nothing_with_its_original() -> None:
    params = full()
    clone: Any = params.clone()
    assert clone == params
    clone.temperature = 0.1
    for values in (clone.stop, clone.bad_words, clone.stop_token_ids, clone.allowed_token_ids):
        values.append(9)
    clone.logit_bias[5] = 2.0
    clone.extra_args["deep"].append(2)
    assert params == full()


def test_params_round_trip_through_bytes() -> None:
    params = SamplingParams(
        n=2, seed=7, stop=["x"], logit_bias={3: -1.5}, output_kind=RequestOutputKind.DELTA, max_tokens=None
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert len(msgspec.msgpack.encode(SamplingParams())) < 4, "defaults cost nothing"
