"""Any combination of keywords: the grammar accepts all valid values, and others only where they are checked."""

import pytest

from support.json_schema.json_grammars import PreparedTrial
from support.json_schema.keyword_schemas import VALUES, KeywordSchemaBuilder
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.json_schema.validator import SchemaValidator

SEEDS = 300
GROUPS = 6


def check_schema(seed: int) -> bool:
    """Compare grammar and validator on all values; returns whether the schema is served."""
    schema = KeywordSchemaBuilder(seed).build()
    validator = SchemaValidator(schema)
    valid, invalid = list[object](), list[object]()
    for value in VALUES:
        (valid if validator.find_error(value) is None else invalid).append(value)
    try:
        trial = PreparedTrial(schema)
    except BadRequestError:
        assert valid == [], (seed, schema)
        return False
    assert [value for value in valid if not trial.is_forced(value)] == [], (seed, schema)
    assert [value for value in invalid if trial.is_valid(value)] == [], (seed, schema)
    return True


@pytest.mark.parametrize("group", range(GROUPS))
def test_grammar_and_check_agree_with_a_validator(group: int) -> None:
    served = [check_schema(seed) for seed in range(group, SEEDS, GROUPS)]
    assert sum(served) > len(served) / 2
