"""Plain data as JSON and back, and what is refused."""

from __future__ import annotations

import argparse
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp_core.checkpoint.format.plain_data import decode, encode
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.testing.refusals import assert_says, refusal


class AttributeDict(dict[str, Any]):
    """As Lightning's: a dict whose keys are attributes too."""


class Colour(enum.Enum):
    """An enum."""

    RED = 1


class Text(str):
    """A string with a class of its own."""


Point = namedtuple("Point", "x y")


def through_json(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}

    def store(keys: tuple[str, ...], tensor: Any) -> dict[str, str]:
        tensors["/".join(keys)] = tensor
        return {"$tensor": "/".join(keys)}

    text = json.dumps(encode(value, store), allow_nan=False)
    return decode(json.loads(text), lambda tag, name: tensors[name])


#: Whatever plain data may be.
PLAIN: list[Any] = [
    None,
    True,
    -3,
    10**30,
    0.1,
    -0.0,
    5e-324,
    float("inf"),
    float("-inf"),
    1 + 2j,
    complex("inf"),
    "ünïcode \U0001f600 \x00",
    b"\x00\xff",
    b"",
    [],
    [1, [2, [3]]],
    (),
    (1, (2,)),
    {},
    {"a": {"b": [1, None]}},
    {1: "a", "1": "b", None: 0, (1, 2): 3, 1.5: 4, False: 5},
    {"$tuple": [1]},
    {"a": 1, "$b": 2},
    {1, 2, 30},
    frozenset({(1, 2)}),
    Counter("abracadabra"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    timedelta(days=-3, microseconds=7),
    datetime(2024, 2, 29, 12, 30, 1, 7, tzinfo=UTC),
    datetime(2024, 2, 29),
    date(2024, 2, 29),
    time(1, 2, 3),
    Path("/a/b.ckpt"),
    torch.float8_e4m3fn,
    torch.complex128,
    torch.device("cuda", 3),
    torch.Size([2, 3]),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    np.float32(1.5),
    np.int64(-7),
    np.float64("inf"),
    np.bool_(True),
    np.complex64(1 + 2j),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_comes_back_equal_and_of_its_type(value: Any) -> None:
    back = through_json(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)  # order of keys, signs of zeros, default factories


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (AttributeDict(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Text("abc"), "abc"),
        (PurePosixPath("/a"), Path("/a")),
        (bytearray(b"ab"), b"ab"),
        (np.str_("abc"), "abc"),
        (torch.__version__, str(torch.__version__)),
    ],
    ids=repr,
)
def test_a_subclass_comes_back_as_the_plain_type(value: Any, plain: Any) -> None:
    back = through_json(value)
    assert type(back) is type(plain)
    assert back == plain


def test_nan_comes_back() -> None:
    assert math.isnan(through_json({"x": float("nan")})["x"])
    assert np.isnan(through_json(np.float32("nan")))


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint32", "bool", ">f4"])
def test_numpy_arrays_come_back_as_arrays(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)[:, ::-1]
    back = through_json({"state": ("MT19937", array)})["state"][1]
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype.newbyteorder("=")
    assert (back == array).all()


def test_tensors_are_handed_over_with_the_keys_that_lead_to_them() -> None:
    seen = {}
    encode({"a": [{"b": torch.zeros(1)}], 3: (torch.ones(2),)}, lambda keys, tensor: seen.update({keys: tensor}))
    assert set(seen) == {("a", "0", "b"), ("3", "0")}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (print, r"'a/b': builtins.builtin_function_or_method is neither .* save its name instead"),
        (lambda: None, "'a/b': builtins.function is neither plain data nor a tensor; save its name instead"),
        (
            torch.nn.Linear(1, 1),
            r"'a/b': torch.nn.modules.linear.Linear is neither .* save its .state_dict\(\) instead",
        ),
        (object(), "'a/b': builtins.object is neither .* turn it into dicts, lists, numbers, strings and tensors"),
        (int, "'a/b': builtins.type is neither plain data nor a tensor; save its name instead"),
        (Colour.RED, "'a/b': .*Colour is an enum, which needs code to restore; save its .value"),
        (defaultdict(lambda: 1), "'a/b': a defaultdict over .* would need code to restore"),
        (np.array(["x"]), "'a/b': a numpy array of <U1 can't be a tensor"),
        (np.array([object()]), "'a/b': a numpy array of object can't be a tensor"),
        (np.datetime64("2024-01-01"), "'a/b': numpy.datetime64 is neither"),
        ({torch.zeros(1): 1}, "'a/b': a tensor can't be a key"),
        ({Colour.RED: 1}, "'a/b/Colour.RED': .*is an enum"),
        (torch.Generator(), "'a/b': torch._C.Generator is neither"),
        (range(3), "'a/b': builtins.range is neither"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_refuses_what_is_not_plain_and_says_what_to_do(value: Any, message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        encode({"a": {"b": value}}, lambda keys, tensor: None)


def test_names_every_refused_value_at_once_but_at_most_twenty() -> None:
    message = refusal(CheckpointValueError, lambda: encode([object()] * 23, lambda keys, tensor: None))
    assert message.count("builtins.object") == 20
    assert_says(message, "'19'", "… and 3 more")


def test_refuses_a_container_that_contains_itself() -> None:
    endless: list[Any] = [1]
    endless.append({"again": endless})
    with pytest.raises(CheckpointValueError, match="'1/again': a container that contains itself"):
        encode(endless, lambda keys, tensor: None)


def test_the_same_container_twice_is_no_loop() -> None:
    shared = [1]
    assert through_json([shared, shared]) == [[1], [1]]


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match=r"which this version does not support: upgrade fsdp-core"):
        decode({"$import": "os.system"}, lambda tag, name: None)
