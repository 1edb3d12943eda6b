"""The tests of the shop, without a broker: `manage.py test`."""

import asyncio
from decimal import Decimal

from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import IntegrityError

from relay.consume import Inbox
from relay.testing import Harness
from relay.testing.django import OutboxTestCase, OutboxTransactionTestCase

from .orders import BLOCKED, OrderPlaced, add_up, place_order, total_of


class Placing(OutboxTestCase):
    def test_an_order_is_written_with_its_event(self) -> None:
        answer = self.client.post("/orders", {"customer": 17, "amount": "9.90"})

        written = self.outbox.assert_written("OrderPlaced", key=("customer", "17"), payload={"amount": "9.90"}, count=1)
        assert written == OrderPlaced(order=answer.json()["order"], customer=17, amount=Decimal("9.90"))

    def test_an_order_that_the_table_refuses_has_no_event(self) -> None:
        with self.assertRaises(IntegrityError):
            place_order(17, Decimal(0))

        self.outbox.assert_nothing_written()

    def test_an_order_takes_two_statements(self) -> None:
        with self.assertNumQueries(4) as queries:  # with those of the savepoint
            place_order(17, Decimal(1))

        assert 'INSERT INTO "outbox".message' in queries[2]["sql"]


class AddingUp(OutboxTransactionTestCase):
    def setUp(self) -> None:
        self.harness = Harness([add_up], inbox=Inbox(self.outbox_url, "totals"))

    def test_orders_are_added_up(self) -> None:
        for amount in (1, 2):
            place_order(17, Decimal(amount))

        asyncio.run(self.harness.drain(self.outbox)).raise_first()

        assert self.client.get("/customers/17/total").json() == {"total": "3.00"}

    def test_an_order_counts_once_also_when_it_comes_again(self) -> None:
        delivered = asyncio.run(self.harness.crash_before_ack(OrderPlaced(order=1, customer=17, amount=Decimal(5))))

        delivered.raise_first()
        assert delivered.duplicates == 1
        assert total_of(17) == 5

    def test_a_handler_that_fails_leaves_nothing(self) -> None:
        asyncio.run(self.harness.deliver(OrderPlaced(order=1, customer=BLOCKED, amount=Decimal(5))))

        (dead,) = self.harness.dead
        assert dead.error == "relay.consume.classify.Permanent: the customer is blocked"
        assert total_of(BLOCKED) == 0


class Operating(OutboxTestCase):
    def test_the_checks_find_nothing_wrong(self) -> None:
        call_command("check", databases=["default"], fail_level="INFO")

    def test_the_admin_shows_the_message_and_changes_nothing(self) -> None:
        place_order(17, Decimal(1))
        self.client.force_login(User.objects.create_superuser("root"))

        page = self.client.get("/admin/outbox_relay/outboxrow/", {"q": "customer 17", "state": "pending"})

        (message,) = page.context["cl"].result_list
        assert (message.event_type, message.key) == ("OrderPlaced", "customer 17")
        shown = self.client.get(f"/admin/outbox_relay/outboxrow/{message.pk}/change/")
        self.assertContains(shown, str(message.message_id))
        self.assertNotContains(shown, 'type="submit" value="Save"')
        assert self.client.post("/admin/outbox_relay/outboxrow/add/").status_code == 403
