"""The list of the admin, by `relay.operate.messages.look` in place of a query set.

A query set would sort or count all rows: sent rows have no index, and each state has another one.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import messages
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import Paginator
from django.db import DatabaseError
from django.http import HttpRequest
from django.urls import reverse

from relay.django import reading, where
from relay.django.models import OutboxRow
from relay.errors import UsageError
from relay.operate.messages.look import FoundPage, MessageState, Place, Search, search
from relay.operate.messages.whereabouts import row_id

AGES = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}
# In quotes, a part may have spaces.
FIRST_PART = re.compile(r'(?:"([^"]+)"(?!\S)|(\S+))\s*(.*)', re.DOTALL)
QUOTED = re.compile(r'\A"([^"]+)"\Z')
CHECK = "`manage.py check --database {alias}` says what is missing."


class StateFilter(SimpleListFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, _request: HttpRequest, _model_admin: Any) -> list[tuple[str, str]]:
        return [(state.value, state.value) for state in MessageState]

    def queryset(self, _request: HttpRequest, queryset: Any) -> Any:
        return queryset


class TimeFilter(StateFilter):
    """By the time of sending, or of writing where a message was not sent."""

    title = "sent or written"
    parameter_name = "past"

    def lookups(self, _request: HttpRequest, _model_admin: Any) -> list[tuple[str, str]]:
        return [("hour", "Past hour"), ("day", "Past 24 hours"), ("week", "Past 7 days")]


FILTERS = (StateFilter, TimeFilter)


class MessageList(ChangeList):
    """A page of messages.

    Attributes:
        next_page: the query of the page behind it; None on the last one.
        looked_until: the time up to which sent rows were looked through, if the search goes on behind this page.
    """

    next_page: str | None
    looked_until: datetime | None

    def get_results(self, request: HttpRequest) -> None:
        page = self._page(request)
        self.result_list = [reading.as_model(line) for line in page.lines]
        self.result_count = self.full_result_count = len(page.lines)  # equal: no count is shown at the search
        self.show_full_result_count = False
        self.can_show_all = self.multi_page = self.show_admin_actions = False
        self.paginator = Paginator(self.result_list, max(1, len(page.lines)))
        self.next_page = None if page.next is None else self.get_query_string({PAGE_VAR: page.next})
        self.looked_until = page.looked_until

    def url_for_result(self, result: OutboxRow) -> str:
        """Return the address of a message. That of a sent one has the place in the table, as there is no index."""
        at = str(result.pk) if result.place is None else f"{result.pk}.{result.place}"
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return str(reverse(name, args=(at,), current_app=self.model_admin.admin_site.name))

    def _page(self, request: HttpRequest) -> FoundPage:
        try:
            wanted = search_of(self.query, self.params.get("state"), self.params.get("past"))
            with reading.tables() as outbox:
                return search(outbox, wanted, after=request.GET.get(PAGE_VAR))
        except (UsageError, ValueError, KeyError) as error:
            raise IncorrectLookupParameters from error
        except DatabaseError as error:
            _tell(request, error)
            return FoundPage([], None)


def search_of(text: str, state: str | None, past: str | None) -> Search:
    """Return what the search box and the filters ask for.

    Raises:
        ValueError: there is no such state.
        KeyError: there is no such time.
    """
    since = datetime.now(UTC) - AGES[past] if past else None
    return Search(state=MessageState(state) if state else None, since=since, **_searched(text.strip()))


def _searched(text: str) -> dict[str, Any]:
    if not (found := FIRST_PART.match(text)):
        return {}
    quoted, plain, rest = found.groups()
    if rest:
        return {"aggregate_type": plain or quoted, "aggregate_id": QUOTED.sub(r"\1", rest)}
    try:
        return {"row": row_id(plain)} if plain else {"event_type": quoted}
    except UsageError:
        return {"event_type": plain}


def message_at(request: HttpRequest, address: str) -> OutboxRow | None:
    """Return the message that a list has linked; None when it is not there any more, never was, or cannot be read."""
    try:
        row, _, place = address.partition(".")
        found = row_id(row)
        return reading.read(found, Place.of(place) if place else None) if isinstance(found, int) else None
    except UsageError:
        return None
    except DatabaseError as error:
        _tell(request, error)
        return None


def _tell(request: HttpRequest, error: DatabaseError) -> None:
    problem = str(error).partition("\n")[0]
    messages.error(request, f"{problem}: {CHECK.format(alias=where.alias())}")
