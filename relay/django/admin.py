"""A page of the admin that shows messages. Nothing can be changed here: `relay parked` and `relay console` do that."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from relay.django.models import OutboxRow

HELP = 'An id or message id; a key, as customer 17; or an event type. Put " around a part that has spaces.'


@admin.register(OutboxRow)
class MessageAdmin(admin.ModelAdmin):
    """Messages in any state, what waits first. A look costs as little in a table of millions."""

    list_display = ("id", "event_type", "key", "state", "last_error", "created_at", "sent_at")
    search_fields = ("message_id",)  # there is a search; `pages` does it
    search_help_text = HELP
    sortable_by = ()
    actions = None
    show_facets = admin.ShowFacets.NEVER  # they would count

    def has_add_permission(self, _request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        return False

    # Django also asks these when a page is shown. Imported before, `pages` would cost each command 0.2 s.
    def get_changelist(self, _request: HttpRequest, **_: Any) -> type:
        from relay.django.pages import MessageList  # noqa: PLC0415

        return MessageList

    def get_list_filter(self, _request: HttpRequest) -> tuple[type, ...]:
        from relay.django.pages import FILTERS  # noqa: PLC0415

        return FILTERS

    def get_search_results(self, _request: HttpRequest, queryset: Any, _search_term: str) -> tuple[Any, bool]:
        return queryset, False

    def get_object(self, request: HttpRequest, object_id: str, _from_field: str | None = None) -> OutboxRow | None:
        from relay.django.pages import message_at  # noqa: PLC0415

        return message_at(request, object_id)
