"""Options: code wins over the environment, which wins over the default; anything else is a typed error."""

import copy
import datetime

import pytest

from iris_pg.errors import OptionError
from iris_pg.options import VARIABLES, Options


def test_defaults_are_those_of_the_table(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    options = Options()
    for variable in VARIABLES:
        assert getattr(options, {"timeout": "timeout_s"}.get(variable.field, variable.field)) == variable.default


@pytest.mark.parametrize(
    ("name", "text", "field", "value", "given"),
    [
        ("IRIS_PG_ENGINE", "sdma", "engine", "sdma", dict(engine="cu")),
        ("IRIS_PG_HEAP_BYTES", "4096", "heap_bytes", 4096, dict(heap_bytes=8192)),
        ("IRIS_PG_CHUNK_BYTES", "512", "chunk_bytes", 512, dict(chunk_bytes=256)),
        ("IRIS_PG_DEVICE_CHUNK_BYTES", "512", "device_chunk_bytes", 512, dict(device_chunk_bytes=256)),
        ("IRIS_PG_DIRECT_BYTES", "0", "direct_bytes", 0, dict(direct_bytes=7)),
        ("IRIS_PG_COMM_SMS", "8", "comm_sms", 8, dict(comm_sms=16)),
        ("IRIS_PG_INTER_HOST", "gloo", "inter_host", "gloo", dict(inter_host="nccl")),
        ("IRIS_PG_TIMEOUT", "2.5", "timeout_s", 2.5, dict(timeout=1.0)),
        ("IRIS_PG_HOSTILE_SEED", "7", "hostile_seed", 7, dict(hostile_seed=0)),
        ("IRIS_PG_HOST", "a", "host", "a", dict(host="b")),
    ],
)
def test_code_wins_over_the_environment(monkeypatch, name, text, field, value, given):
    monkeypatch.setenv(name, text)
    assert getattr(Options(), field) == value
    assert getattr(Options(**given), field) == next(iter(given.values()))
    monkeypatch.setenv(name, "")
    assert getattr(Options(), field) != value, "an empty variable counts as not set"


def test_every_variable_has_a_row_and_a_case():
    assert [v.field for v in VARIABLES] == [
        *("engine", "heap_bytes", "chunk_bytes", "device_chunk_bytes", "direct_bytes"),
        *("comm_sms", "inter_host", "timeout", "hostile_seed", "host"),
    ]
    assert all(v.name == f"IRIS_PG_{v.field.upper()}" and v.unit and v.meaning for v in VARIABLES)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(engine="warp"), r"engine='warp' is not known; it is one of 'auto', 'cu', 'sdma'"),
        (dict(engine=3), "engine=3 is not known"),
        (dict(inter_host="tcp"), r"inter_host='tcp' is not known; it is one of 'auto', 'gloo', 'nccl'"),
        (dict(host=3), "host=3; it takes a name"),
        (dict(heap_bytes=0), "heap_bytes=0; it takes a positive"),
        (dict(heap_bytes=1.5), r"heap_bytes=1\.5; it takes a positive"),
        (dict(heap_bytes="1G"), "heap_bytes='1G'"),
        (dict(chunk_bytes=0), "chunk_bytes=0; it takes a positive multiple of 256"),
        (dict(chunk_bytes=-256), "chunk_bytes=-256"),
        (dict(chunk_bytes=1000), "chunk_bytes=1000"),
        (dict(device_chunk_bytes=1000), "device_chunk_bytes=1000; it takes a positive multiple of 256"),
        (dict(direct_bytes=-1), "direct_bytes=-1"),
        (dict(direct_bytes="never"), "direct_bytes='never'"),
        (dict(comm_sms=0), "comm_sms=0; it takes a positive number of CTAs"),
        (dict(comm_sms=2.0), r"comm_sms=2\.0"),
        (dict(timeout=0), "timeout=0"),
        (dict(timeout=-1.0), r"timeout=-1\.0"),
        (dict(timeout=float("nan")), "timeout=nan"),
        (dict(timeout=float("inf")), "timeout=inf"),
        (dict(timeout=1e300), r"timeout=1e\+300"),
        (dict(timeout=datetime.timedelta(0)), r"timeout=0\.0"),
        (dict(timeout="soon"), "timeout='soon'"),
        (dict(hostile_seed=1.5), r"hostile_seed=1\.5; it takes an integer"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_is_right(wrong, message):
    with pytest.raises(OptionError, match=message):
        Options(**wrong)


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.parse is not str], ids=lambda v: v.name)
def test_a_variable_that_cannot_be_read(monkeypatch, variable):
    monkeypatch.setenv(variable.name, "lots")
    with pytest.raises(OptionError, match=f"{variable.name}='lots' cannot be read; it takes {variable.unit}"):
        Options()


def test_a_deep_copy_has_the_same_values():
    sizes = dict(heap_bytes=12345, chunk_bytes=768, device_chunk_bytes=1024, direct_bytes=9, comm_sms=4)
    options = Options(engine="cu", **sizes, timeout=9.5, hostile_seed=3, inter_host="gloo", host="a")
    assert repr(copy.deepcopy(options)) == repr(options)
    assert options.timeout_s == 9.5
    assert Options(timeout=datetime.timedelta(minutes=1)).timeout_s == 60
    assert repr(options) == (
        "Options(engine='cu', heap_bytes=12345, chunk_bytes=768, device_chunk_bytes=1024, direct_bytes=9, comm_sms=4, "
        "timeout=9.5, hostile_seed=3, inter_host='gloo', host='a')"
    )
