"""Formats: what is valid by their RFCs, in checks and in llguidance's strings."""

import pytest

from support.json_schema.json_strings import ForcedStrings
from warmline_backend.structured_output.json_schema.formats import FORMATS, check_format, force_format

LABEL = "a" * 63
CASES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "0000-02-29", "2000-02-29", "1999-12-31", "2023-04-30"],
        ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-1-1", "24-01-01", "2024-01-00"],
    ),
    "time": (
        ["00:00:00Z", "23:59:59.123456+23:59", "12:30:00-00:00", "12:30:00z"],
        ["24:00:00Z", "12:60:00Z", "12:00:61Z", "12:00:00", "12:00Z", "12:00:00.Z", "12:00:00+24:00", "12:00:00 Z"],
    ),
    "date-time": (
        ["2024-02-29T23:59:59Z", "1963-06-19t08:30:06.28-08:00"],
        ["2024-02-29 23:59:59Z", "2023-02-29T00:00:00Z", "2024-02-29T23:59:59", "2024-02-29"],
    ),
    "duration": (
        ["P1Y2M3D", "P1YT1H", "PT36H", "PT1H2M3S", "P2W", "P0D"],
        ["P", "PT", "P1D1Y", "P1Y1W", "P1DT", "PT1D", "1D", "P1.5D", "P1Y1D"],
    ),
    "email": (
        ["a@b", "first.last+tag@mail.example.com", '"a b"@c.de', r'"a\"b"@c.de', "a@[127.0.0.1]", "a@[IPv6:::1]"],
        ["a", "@b", "a@", ".a@b", "a.@b", "a..b@c", "a b@c", "a@b_c", "a@-b", "a@[1.2.3.256]", "é@b.c"],
    ),
    "hostname": (
        ["a", "www.example.com", "1-2.3", LABEL, ".".join([LABEL] * 3 + ["a" * 61]), "xn--4gbwdl"],
        ["", ".", "a.", "-a", "a-", "a_b", "a..b", LABEL + "a", ".".join([LABEL] * 3 + ["a" * 62]), "é.com"],
    ),
    "ipv4": (["0.0.0.0", "255.249.199.10"], ["256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.\u0664"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7::"],
        ["1", ":::", "1::2::3", "1:2:3:4:5:6:7", "12345::", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4", "fe80::1%eth0"],
    ),
    "uri": (
        ["https://u:p@example.com:80/a/b%20c?d=e&f#g", "urn:a:b", "mailto:a@b.c", "file:///a", "http://[::1]/", "a:"],
        ["//a/b", "/a", "a", "http://a b", "http://a/%zz", "1a:b", "http://[::g]/", "http://é", "a:b#c#d", ":a", ""],
    ),
    "uri-reference": (
        ["", "a", "../a?b#c", "//a/b", "/a//b", "#a", "?a", "https://a/b", "a/b:c"],
        ["\\a", "a b", "#a#b", "1:a", "%", "//[::g]", "é"],
    ),
    "iri": (["https://exämple.com/ä?ö=\ue000#ü", "a:😀"], ["ä", "http://a b", "ä:b", "http://a/<", "a:#\ue000"]),
    "iri-reference": (["ä/ö?ü", "#é", ""], ["a b", "\\é", "<é>"]),
    "uri-template": (
        ["", "http://a/{b}{?c,d*}{/e:3}", "{+a.b}", "a%20b", "é"],
        ["{", "a}", "{}", "{a", "{a b}", "{a:0}", "{a:12345}", "a b", "%2", "{{a}}", '"', "{.}"],
    ),
    "uuid": (
        ["2eb8aa08-AA98-11ea-b4aa-73b441d16380", "00000000-0000-0000-0000-000000000000"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g", "{}"],
    ),
    "json-pointer": (["", "/", "/a~0b/~1/c d", '/"\\\n', "/é"], ["a", "#/a", "/~", "/~2", "/a~"]),
    "relative-json-pointer": (["0", "1/a", "10#", "2/~1"], ["", "/a", "01", "-1", "1##", "1a"]),
    "idn-email": (["실례@실례.테스트", "a.b@example.com", '"é x"@a.b'], ["a", "@b", ".é@b", "é@", "é@a b", "a@〮실"]),
    "idn-hostname": (
        ["실례.테스트", "a.b", "a。b", "ß"],
        ["", ".", "-a", "〮실례", "a b", "a_b", "é" * 300, LABEL + "a"],
    ),
    "regex": (["a", "", "^[a-z]+$", r"(?<a>.)\k<a>", r"\p{L}\/"], ["[", "(", "a**", r"\a", r"\Z", "(?i)a"]),
}
IN_PART = {"idn-email", "idn-hostname", "regex"}


@pytest.mark.parametrize("name", CASES)
def test_formats_follow_their_grammars(name: str) -> None:
    valid, invalid = CASES[name]
    check, forced = check_format(name), force_format(name)
    assert check is not None and forced is not None
    assert [text for text in valid if not check(text)] == []
    assert [text for text in invalid if check(text)] == []
    strings = ForcedStrings(forced)
    assert [text for text in valid if text not in strings] == []
    assert forced.is_exact == (name not in IN_PART)
    if forced.is_exact:
        assert [text for text in invalid if text in strings] == []


def test_all_formats_are_listed() -> None:
    assert FORMATS.keys() == CASES.keys()
    assert {name for name, kind in FORMATS.items() if kind != "forced"} == IN_PART


@pytest.mark.parametrize(
    ("time", "is_valid"),
    [
        ("23:59:60Z", True),
        ("23:59:60.5z", True),
        ("01:29:60+01:30", True),
        ("15:59:60-08:00", True),
        ("23:59:60-00:30", False),
        ("22:59:60Z", False),
        ("23:58:60+00:00", False),
        ("24:59:60Z", False),
    ],
)
def test_leap_seconds_are_valid_at_the_end_of_a_day_but_never_forced(time: str, is_valid: bool) -> None:
    for name, text in (("time", time), ("date-time", f"2016-12-31T{time}"), ("date-time", f"2023-02-29T{time}")):
        check, forced = check_format(name), force_format(name)
        assert check is not None and forced is not None
        assert check(text) == (is_valid and "02-29" not in text)
        assert text not in ForcedStrings(forced)


def test_unknown_formats_have_no_effect() -> None:
    for name in ("color", "int32", "", "Date"):
        assert check_format(name) is None and force_format(name) is None
