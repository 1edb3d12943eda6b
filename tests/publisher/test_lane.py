"""A lane computed here is the lane that the table gives."""

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.publisher.lane import lane_of

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
KEYS = st.lists(st.tuples(TEXTS, TEXTS), min_size=50, max_size=50)

LANES = """
    SELECT array_agg((hashtextextended(type || '/' || id, 0) & 15)::integer ORDER BY position)
    FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS key (type, id, position)
"""


@pytest.mark.every_postgres
def test_it_is_the_lane_of_the_table(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:

        @given(KEYS)
        @settings(max_examples=20)
        def check(keys: list[tuple[str, str]]) -> None:
            types, ids = (list(column) for column in zip(*keys, strict=True))
            (lanes,) = connection.execute(LANES, [types, ids]).fetchone() or ([],)

            assert [lane_of(type_.encode(), id_.encode()) for type_, id_ in keys] == lanes

        check()
