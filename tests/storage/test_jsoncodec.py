"""What is encoded comes back, with its key order, whatever a model or an environment put into it."""

import math
import struct
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymckpt import jsoncodec, jsontext

text = st.text(alphabet=st.characters(codec=None, categories=None), max_size=20) | st.sampled_from(
    ["\ud800", "\udc00", "\ud83d\ude00", "\ud83d\ud83d\ude00\ude00", "\u0085\u2028\u2029\0", '\\u0041"', "G\x7f\xf0"]
)
numbers = (
    st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**18, 10**19])
    | st.floats()
)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=25,
)


def same(left: Any, right: Any) -> bool:
    """Equal in values, types and key order; NaN equals NaN, 0.0 does not equal -0.0. Not recursive: values are deep."""
    pairs = [(left, right)]
    while pairs:
        a, b = pairs.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if list(a) != list(b):
                return False
            pairs += zip(a.values(), b.values(), strict=True)
        elif isinstance(a, list):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, float):
            if math.isnan(a) != math.isnan(b) or (
                not math.isnan(a) and (a, math.copysign(1, a)) != (b, math.copysign(1, b))
            ):
                return False
        elif a != b:
            return False
    return True


def nested(depth: int) -> Any:
    value: Any = "core"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@given(values)
@settings(max_examples=150, deadline=None)
def test_any_value_comes_back(value: Any) -> None:
    data, exact = jsoncodec.encode(value)
    assert same(jsoncodec.loads(data), value)
    assert b"\n" not in data
    if exact:
        assert same(jsoncodec.loads_exact(data), value)


@given(values)
@settings(max_examples=80, deadline=None)
def test_the_total_half_reads_what_it_writes(value: Any) -> None:
    data = jsontext.render(value, max_depth=1000, sort_keys=False)
    assert same(jsontext.parse(data.decode("utf-8", "surrogatepass")), value)


@given(values)
@settings(max_examples=80, deadline=None)
def test_canonical_form_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    def reverse(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: reverse(item[key]) for key in reversed(item)}
        return [reverse(child) for child in item] if isinstance(item, list) else item

    assert jsoncodec.canonical(value) == jsoncodec.canonical(reverse(value))


@pytest.mark.parametrize("digits", [4299, 4301, 3999, 4000, 8001, 20_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_of_any_length_comes_back(digits: int, sign: int) -> None:
    value = sign * (10**digits + 7 * 10 ** (digits // 2))
    assert jsoncodec.loads(jsoncodec.dumps({"n": [value]}))["n"][0] == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beside", [None, "null", 1, "\x7f" * 99, "\x7f" * 1000, -1.5e308, [5e-324, -(2**31)] * 500,
                                    [-1, None] * 99, [127, None] * 99])  # fmt: skip
def test_a_non_finite_float_never_becomes_null(value: float, beside: Any) -> None:
    assert same(
        jsoncodec.loads(jsoncodec.dumps({"a": beside, "b": [{"c": value}]})), {"a": beside, "b": [{"c": value}]}
    )


def test_bytes_that_look_like_a_non_finite_float_keep_the_fast_way() -> None:
    looks_like = struct.unpack(">d", b"\x3f\xf0\xcb\x7f\xf8\xcb\xff\xf0")[0]
    value = {"a": None, "b": [looks_like, -1, 127, (1.5, "\x7f\u02ff")], "small": 1e-7}
    assert jsoncodec.encode(value) == (orjson.dumps(value), True)
    assert jsoncodec.canonical(value) == orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


@pytest.mark.parametrize("depth", [1, 254, 255, 999, 1000])
def test_nesting_to_a_thousand_levels_comes_back(depth: int) -> None:
    assert same(jsoncodec.loads(jsoncodec.dumps(nested(depth))), nested(depth))
    deep = {"x": 2**70, "nan": math.nan, "rest": nested(depth - 1)}
    assert same(jsoncodec.loads(jsoncodec.dumps(deep)), deep)


def test_deeper_nesting_is_refused_with_its_path() -> None:
    with pytest.raises(jsoncodec.NotJson, match=r"1000 levels deep at /a/0/a/0/a/0/\.\.\./"):
        jsoncodec.dumps(nested(1001))


@pytest.mark.parametrize(
    ("value", "path"), [({"a": [{1, 2}]}, "/a/0"), ({"a": {"b~/c": b""}}, "/a/b~0~1c"), ({"k": {3: 4}}, "/k")]
)
def test_what_json_cannot_hold_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(jsoncodec.NotJson) as refused:
        jsoncodec.dumps(value)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"[1,]", b'{"a" 1}', b'{"a":1', b'"\xff"', b"01", b"[1 2]", b"nul", b"-", b"[" * 5000, b"1" * 2_000_000,
     b"NaN1", b'{"a":NaN,}', b"[NaN", b'{"a":NaN "b"}', b"\xef\xbb\xbf1"],
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(jsoncodec.NotJson):
        jsoncodec.loads(data)
