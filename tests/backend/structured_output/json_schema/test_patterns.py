"""Patterns: ECMA-262's semantics, the same in llguidance's strings, and bounds for costly ones."""

import random

import pytest

from support.json_schema.json_strings import ForcedStrings
from warmline_backend.structured_output.json_schema.patterns import (
    CheckTooCostlyError,
    ForcedPattern,
    PatternError,
    clear_patterns,
    compile_check,
    force_pattern,
    simplify_pattern,
)

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
LEAP_DATE = r"^(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29$"
CIDR = r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(25[0-5]|[0-9]{1,2})\/([0-9]|[1-2][0-9]|3[0-2])$"
BASE64 = r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
PASSWORD = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z\d@$!%*#?&]{8,}$"
DURATION = r"^P(?!$)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?$"

# (pattern, texts that match, texts that don't)
EXACT: list[tuple[str, list[str], list[str]]] = [
    # Search, edges
    ("a", ["a", "bab"], ["", "b"]),
    ("^a|b$", ["ax", "xb"], ["xax", "bx"]),
    ("(^|,)x(,|$)", ["x", "a,x", "x,a", ",x,"], ["ax", "xa", ""]),
    ("(^a|b)*c", ["abc", "xc", "c"], ["ab", ""]),
    ("(a$|^b)+", ["xa", "bx"], ["ax", "xb"]),
    ("((^|a)b)*$", ["", "x"], []),
    ("x^a", [], ["x^a", "a"]),
    ("^$", [""], ["a", "\n"]),
    ("$^", [""], ["a"]),
    ("^^a$$", ["a"], ["aa", "a\n"]),
    (r"\Aa+\Z", ["aa"], ["aa\n", "ba"]),
    # Characters
    ("^.$", ["é", "😀", "\x85", "\0"], ["\n", "\r", "\u2028", "\u2029", ""]),
    (r"^\d\w\s$", ["1a ", "9_\ufeff", "0Z\u3000"], ["\u0661a ", "1é ", "1a\x85", "1a\u180e"]),
    (r"^\D\W\S$", ["\u0661é\x85", "a-a"], ["a-\ufeff", "1-a", "aaa"]),
    ("^[^a]{2}$", ["\n😀", "bb"], ["ab", "b"]),
    (r"^[\s\S]{2}$", ["\n😀"], ["😀"]),
    ("^[^]+$", ["\n"], [""]),
    ("a[]|b", ["b"], ["a"]),
    (r"^\/\-\_\@\#\"\'$", ["/-_@#\"'"], [""]),
    (r"^\cJ[\cI\b]\0\v\x41\u00e9\u{1F600}$", ["\n\t\0\vAé😀", "\n\b\0\vAé😀"], ["J"]),
    (r"^\ud83d\ude00[\ud83d\ude00-\ud83d\ude02]$", ["😀😁"], ["😀"]),
    (r"^[\w-.]+[a-\d]$", ["a-.-", "-1", "..a"], ["-b", "-"]),
    ("^[[:a][&&][+--]$", ["[&,", ":&-"], ["a&.", "a:-"]),
    ("^[[:a]]&&[a-]$", ["a]&&-", "[]&&a"], ["]&&-"]),
    ("^a{,2}{$", ["a{,2}{"], ["aa{"]),
    ("^]}a{1,x$", ["]}a{1,x"], []),
    (r"^\p{Lu}\p{L}*[^\p{L}\p{N}]$", ["Éa-", "A😀"], ["éa-", "Aa1"]),
    (r"^\p{Script=Greek}\P{Letter}$", ["\u03b11"], ["a1", "\u03b1\u03b1"]),
    ("(?i)^straße[^k]$", ["STRAßes", "\u017ftraẞeS"], ["strasses", "straßeK", "straße\u212a"]),
    (r"(?i)^\w\W$", ["\u017f-", "K-"], ["ss", "-K"]),
    ("^(?i:a)b(?s:.)$", ["Ab\n", "abx"], ["AB\n"]),
    # Repetition, alternatives
    ("^a+?b*?c??d{2,3}?$", ["add", "aabcddd"], ["ad", "bdd"]),
    ("^(|a)(b||c)$", ["", "a", "ab", "c"], ["abc"]),
    ("^(?:(?:a|b)+c?)*$", ["", "abcab"], ["cab"]),
    ("^(?P<year>\\d{4})-(?<month>\\d\\d)$", ["2024-01"], ["2024-1"]),
    # Lookaheads at the start
    (PASSWORD, ["Abc12345"], ["abc12345", "Abc1234", "Abc 12345"]),
    (r"^(?!\s*$).+", ["a", " a"], ["", "  ", "\u00a0"]),
    (r"^(?!0+$)\d+$", ["10", "01"], ["00", "0", ""]),
    (r"^(?!(?:foo|bar)$)\w+$", ["foos", "fo", "baz"], ["foo", "bar", ""]),
    (r"^(?!con|prn)[a-z]+$", ["com", "prs", "co"], ["con", "cons", "prn"]),
    ("^(?=.{3,5}$)[ab]+$", ["aba", "ababa"], ["ab", "ababab"]),
    ("(?=^a)^ab", ["abc"], ["b"]),
    # Quotes and backslashes, which JSON escapes
    (r'^"(?:[^"\\]|\\.)*"$', ['"a\\"b"', '""'], ['"a"b"', '"\\"']),
    ('^[^"]*$', ["a\\b\n"], ['a"', '"']),
    (r"^[^\\]+$", ['"\t'], ["\\", ""]),
    (r"^[^\x20-\x7e]+$", ["\n\té"], ['"', "\\", "a"]),
    # Libraries'
    (LEAP_DATE, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29"]),
    (CIDR, ["10.0.0.0/8"], ["10.0.0.0/33", "256.0.0.0/8"]),
    (BASE64, ["", "aGVsbG8=", "QQ=="], ["QQ=", "a"]),
    (r"^[A-Za-z0-9-_]+\.[A-Za-z0-9-_]+\.[A-Za-z0-9-_]*$", ["eyJ.x-_.s"], ["a.b"]),
    (r"^\+[1-9]\d{1,14}$", ["+14155552671"], ["+04", "14155552671"]),
    (r"^[0-7][0-9A-HJKMNP-TV-Z]{25}$", ["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["01ARZ3NDEKTSV4RRFFQ69G5FAU"]),
]
# Patterns that more texts match than the forced ones.
IN_PART = [
    (EMAIL, ["a.b@c.de"], [".a@c.de", "a..b@c.de", "a@c"]),
    (DURATION, ["P1Y", "PT1H"], ["P", "PT", "P1YT"]),
    (r"(['\"])a\1", ["'a'", '"a"'], ["'a\"", "a"]),
    (r"^(?<q>a)?b\k<q>$", ["b", "aba"], ["ba", "ab"]),
    (r"^(?:(a)|b)c\1$", ["aca", "bc"], ["ac", "bca"]),
    (r"\bfoo\b", ["foo", "a foo.", "éfoo"], ["foos", "_foo"]),
    (r"a\B", ["ab"], ["a", "a b"]),
    ("(?<=a)b(?!c)", ["ab", "abd"], ["b", "abc"]),
    ("(?<!a)b", ["b", "cb"], ["ab"]),
    ("^(?:(?!foo).)*$", ["fo", ""], ["a foo"]),
    ("(?=a)ab", ["xab"], ["xb"]),
    (r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$", ["😀🎉"], ["a", ""]),
    (r"(?i)^\p{Lu}$", ["a", "A"], ["1"]),
    (r"^\P{P}+$", ["a\n"], ['"', "a."]),
    (r"^[\p{Cs}a]$", ["a"], ["b"]),
]


@pytest.mark.parametrize(("pattern", "matching", "other"), EXACT + IN_PART)
def test_patterns_match_as_in_ecma(pattern: str, matching: list[str], other: list[str]) -> None:
    check, forced = compile_check(pattern), force_pattern(pattern)
    assert [text for text in matching if not check(text)] == []
    assert [text for text in other if check(text)] == []
    strings = ForcedStrings(forced)
    assert [text for text in matching if text not in strings] == []
    assert forced.is_exact == ((pattern, matching, other) in EXACT)
    if forced.is_exact:
        assert [text for text in other if text in strings] == []


@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in EXACT + IN_PART])
def test_forced_strings_agree_with_the_check(pattern: str) -> None:
    """Texts of the pattern's own characters, at random."""
    check, forced = compile_check(pattern), force_pattern(pattern)
    strings, draw = ForcedStrings(forced), random.Random(pattern)
    alphabet = [*pattern, *'ab1 _-.@"\\é😀\n']
    for _ in range(80):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 6)))
        is_valid, is_forced = check(text), text in strings
        assert is_forced or not is_valid, text
        assert is_valid or not is_forced or not forced.is_exact, text


@pytest.mark.parametrize("pattern", [".*", "", "a*", "^", "(?s:.*)", "(a|)$", "^[^]*$"])
def test_patterns_that_any_text_matches_force_nothing(pattern: str) -> None:
    assert force_pattern(pattern) == ForcedPattern((), is_exact=True)


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(", "it has a group without an end (at character 1)"),
        ("a)", "it has a ')' too many (at character 2)"),
        ("[a", "it has a '[' without an end (at character 1)"),
        ("ab[a-", "it has a '[' without an end (at character 3)"),
        ("ab(?=(c)", "it has a group without an end (at character 3)"),
        ("x[[:alpha:]_]", 'it has a POSIX class, "[:alpha:]", which ECMA-262 has not (at character 3)'),
        ("[^[:^digit:]]", 'it has a POSIX class, "[:^digit:]"'),
        ("a**", "it has a quantifier after nothing"),
        ("*", "it has a quantifier after nothing"),
        ("a{3,2}", "whose numbers are out of order"),
        ("[b-a]", "it has a range out of order"),
        ("a\\", "it ends with a backslash (at character 2)"),
        (r"\i", 'it has "\\i", which is no escape'),
        (r"\2(a)", "refers to a group that it does not have"),
        (r"\k<a>", "refers to a group that it does not have"),
        ("(?<a>x)(?<a>y)", "two groups have one name"),
        ("(?>a)", "a group of an unknown kind"),
        ("(?x)a", "an unknown flag, 'x'"),
        ("^*", "it repeats an assertion"),
        (r"a\p{Nonsense}", 'it has an unknown property, "\\p{Nonsense}" (at character 2)'),
        (r"[\P{Script=Nonsense}]", 'it has an unknown property, "\\P{Script=Nonsense}" (at character 2)'),
        ("".join(rf"\p{{L{'_' * count}}}" for count in range(101)), "it has too many properties of characters"),
        (r"\pL", "a property without its name"),
        (r"\u{110000}", "beyond Unicode's"),
        ("(" * 40 + ")" * 40, "nests deeper than 30 groups"),
        ("a" * 9000, "longer than 8000 characters"),
        ("a{99999999999}", "it repeats too often"),
        ("((((a{1000}){1000}){1000}){1000}){1000}", "it repeats too often"),
        ("(?i)" + "".join(rf"[\u0000-\u{{{number}}}]" for number in range(8000, 8060)), "case of too many characters"),
        (r"\S" * 4000, "it has too many ranges of characters"),
        ("." * 4000, "it has too many ranges of characters"),
    ],
)
def test_other_expressions_are_refused(pattern: str, fault: str) -> None:
    for translate in (force_pattern, compile_check):
        with pytest.raises(PatternError) as caught:
            translate(pattern)
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(^|a)" * 60,
        "(" * 29 + "^|a" + ")b|c" * 29,
        "(?:" * 20 + "(?:^|a)(?:b|$)" + "(?:^|c)d(?:$|e))" * 19 + ")",
        "(a)" + "".join(rf"(\{number}\{number})" for number in range(1, 90)),
        "^" + "(?!(?:a|b)(?:a|b)(?:a|b)(?:a|b)(?:a|b)(?:a|b))" * 50,
        "".join(rf"[\p{{L}}{chr(0x4E00 + number)}]" for number in range(500)),
        "|".join(f"a{number}" for number in range(1200)),
        "(^|a)(b|$)" * 20 + "|".join(f"a{number}" for number in range(1300)),
        "([" + "".join(chr(0x4E00 + 2 * number) for number in range(6000)) + "])" + r"\1" * 900,
        "(?i)" + r"[\u0000-\uffff]" * 60,
        "^" + f"(?!{'a' * 99})" * 3,
        "^" + "".join(f"(?!{number})" for number in range(1000)),
    ],
)
def test_large_expressions_stay_bounded(pattern: str) -> None:
    assert sum(map(len, force_pattern(pattern).patterns)) < 200_000
    assert compile_check(pattern)("x") in (True, False)


def test_a_long_literal_is_found() -> None:
    assert compile_check("ab" * 3000)("x" + "ab" * 3000)


def test_a_costly_search_is_ended() -> None:
    with pytest.raises(CheckTooCostlyError):
        compile_check("^(a+)+$")("a" * 10_000 + "b")


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        ("^[a-f]{64}$", "^(?:[a-f]{8,})$"),
        ("^(a{2,500}b){0,99}$", "^(?:(?:a{2,}b)*)$"),
        ("^a{8}$", None),
        ("^a+$", None),
        ("^[" + "".join(map(chr, range(0x4E00, 0x5A00, 2))) + "]{99}$", None),  # longer than what is read, once written
    ],
)
def test_simple_patterns_have_no_large_numbers(pattern: str, simple: str | None) -> None:
    (forced,) = force_pattern(pattern).patterns
    assert simplify_pattern(forced) == simple


def test_kept_patterns_are_deleted() -> None:
    force_pattern(r"^\p{L}$"), compile_check(r"^\p{L}$")
    clear_patterns()
    assert force_pattern.cache_info().currsize == compile_check.cache_info().currsize == 0
