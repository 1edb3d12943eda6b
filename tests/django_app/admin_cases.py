"""The cases of test_admin.py: they run by Django's own test runner, as the tests of an app of a project."""

from typing import Any
from uuid import UUID, uuid4

from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from relay.outbox import Event, add, add_many
from relay.testing.django import OutboxTestCase

LIST = "/admin/outbox_relay/outboxrow/"
SENT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'customer', n::text, 'InvoiceIssued', '{"secret": "opensesame"}', 'sent', now()
    FROM generate_series(1, %s) AS n
"""
PARK = """
    UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'NO_ROUTE <script>'
    WHERE message_id = %s
"""
VIEWER = """
    CREATE ROLE shop_viewer;
    GRANT USAGE ON SCHEMA outbox TO shop_viewer;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO shop_viewer;
    GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO shop_viewer;
"""


def run(statement: str, *values: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)


class Admin(OutboxTestCase):
    def setUp(self) -> None:
        self.client.force_login(User.objects.create_superuser("root"))
        with transaction.atomic():
            self.pending = Event("customer", "17", "InvoiceIssued", {"secret": "opensesame"}, routing_key="a.b")
            self.parked = Event("order", str(uuid4()), "OrderPlaced", {})
            add(connection, self.pending, self.parked)
        run(PARK, self.parked.message_id)
        run(SENT, 60)

    def found(self, **query: str) -> list[tuple[str, UUID]]:
        page = self.client.get(LIST, query)
        assert page.status_code == 200, page.status_code
        return [(message.state, message.message_id) for message in page.context["cl"].result_list]

    def waiting(self) -> list[tuple[str, UUID]]:
        return [("pending", self.pending.message_id), ("parked", self.parked.message_id)]

    def test_what_waits_comes_first_then_what_was_sent_page_by_page(self) -> None:
        assert self.found()[:2] == self.waiting()

        seen: list[Any] = []
        address: str | None = LIST
        while address is not None:
            changes = self.client.get(address).context["cl"]
            seen += [message.pk for message in changes.result_list]
            address = changes.next_page and LIST + changes.next_page
        assert len(seen) == len(set(seen)) == 62

    def test_a_search_finds_ids_keys_and_types(self) -> None:
        (parked,) = self.found(state="parked")
        for text in (str(self.parked.message_id), f"order {self.parked.aggregate_id}", " OrderPlaced "):
            assert self.found(q=text) == [parked], text
        assert self.found(q="customer 17", state="pending") == [self.waiting()[0]]
        assert [state for state, _ in self.found(q="customer 17", past="hour")] == ["pending", "sent"]
        assert self.found(q="nothing") == []

    def test_a_part_that_has_spaces_is_found_in_quotes(self) -> None:
        events = [
            Event("sales order", "1", "OrderPlaced", {}),
            Event("sales order", " 1", "Order Placed", {}),
            Event("sales", "order 1", "4711", {}),
        ]
        with transaction.atomic():
            add(connection, *events)
        searches = {'"sales order" 1': 0, '"sales order" " 1"': 1, "sales order 1": 2, '"Order Placed"': 1, '"4711"': 2}
        for text, place in searches.items():
            assert self.found(q=text) == [("pending", events[place].message_id)], text
        self.assertContains(self.client.get(LIST), "that has spaces")

    def test_the_last_page_leads_to_no_other(self) -> None:
        for sent, following in ((0, False), (1, True)):
            run("DELETE FROM outbox.message")
            run(SENT, sent)
            with transaction.atomic():
                add(connection, *(Event("customer", str(number), "InvoiceIssued", {}) for number in range(50)))
            changes = self.client.get(LIST).context["cl"]
            assert (len(changes.result_list), changes.next_page is not None) == (50, following)

    def test_what_is_no_search_leads_to_the_whole_list(self) -> None:
        for query in ({"state": "lost"}, {"past": "year"}, {"p": "1.2"}, {"payload__contains": "x"}):
            page = self.client.get(LIST, query)
            assert page.status_code in {302, 400}, query

    def test_a_parked_message_shows_its_cause(self) -> None:
        page = self.client.get(LIST, {"state": "parked"})

        self.assertContains(page, "NO_ROUTE &lt;script&gt;")

    def test_each_line_leads_to_its_message_which_does_not_show_what_it_says(self) -> None:
        changes = self.client.get(LIST).context["cl"]
        for message in (*changes.result_list[:2], changes.result_list[-1]):
            page = self.client.get(changes.url_for_result(message))
            self.assertContains(page, str(message.message_id))
            self.assertNotContains(page, "opensesame")
        self.assertContains(self.client.get(changes.url_for_result(changes.result_list[0])), "a.b")

    def test_a_message_that_is_not_there_is_not_found(self) -> None:
        for address in ("9999999", "1.20200101.1.1", "x", "1.x", str(uuid4()), "9" * 40):
            assert self.client.get(f"{LIST}{address}/change/").status_code == 302, address

    def test_nothing_can_be_changed(self) -> None:
        (message, *_) = self.client.get(LIST).context["cl"].result_list
        for address in (f"{LIST}add/", f"{LIST}{message.pk}/change/", f"{LIST}{message.pk}/delete/"):
            assert self.client.post(address, {"state": "sent"}).status_code == 403, address
        self.client.post(LIST, {"action": "delete_selected", "_selected_action": [message.pk]})

        assert self.found()[:2] == self.waiting()

    def test_who_may_view_has_the_permission_alone(self) -> None:
        clerk = User.objects.create_user("clerk", is_staff=True)
        self.client.force_login(clerk)
        assert self.client.get(LIST).status_code == 403

        clerk.user_permissions.add(Permission.objects.get(content_type__app_label="outbox_relay"))
        assert self.found()[:2] == self.waiting()

    def test_a_page_reads_a_bounded_part_of_the_rows(self) -> None:
        with transaction.atomic():
            add_many(connection, [Event("customer", "1", "InvoiceIssued", {}) for _ in range(20_000)])
        run("ANALYZE outbox.message")

        with CaptureQueriesContext(connection) as queries:
            assert len(self.found()) == 50
        assert not [query["sql"] for query in queries if "count(" in query["sql"].lower()]

    def test_missing_tables_are_told_whatever_is_looked_for(self) -> None:
        run("ALTER SCHEMA outbox RENAME TO elsewhere")
        for query in ({}, {"state": "sent"}, {"state": "parked"}, {"q": "customer 17"}, {"q": "1"}):
            page = self.client.get(LIST, query)
            self.assertContains(page, "does not exist")
            self.assertContains(page, "manage.py check --database default")

    def test_django_makes_no_table_for_messages(self) -> None:
        assert not [name for name in connection.introspection.table_names() if name.startswith("outbox_relay")]

    def test_a_login_needs_two_grants_and_is_told_where_to_read_of_them(self) -> None:
        run(VIEWER)
        run("SET LOCAL ROLE shop_viewer")
        page = self.client.get(LIST)
        self.assertContains(page, "Permission denied for view message_state: ")
        self.assertContains(page, "manage.py check --database default")
        page = self.client.get(f"{LIST}1/change/", follow=True)
        self.assertContains(page, "Permission denied for view message_state: ")

        run("RESET ROLE")
        run("GRANT SELECT ON outbox.message, outbox.message_state TO shop_viewer")
        run("SET LOCAL ROLE shop_viewer")
        changes = self.client.get(LIST).context["cl"]
        for message in (changes.result_list[0], changes.result_list[-1]):
            self.assertContains(self.client.get(changes.url_for_result(message)), str(message.message_id))
