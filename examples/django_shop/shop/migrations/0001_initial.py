"""The tables of the shop and of the outbox. After an update of outbox-relay, a new migration has Migrate() again."""

from typing import ClassVar

from django.db import migrations, models

from relay.django import Migrate


class Migration(migrations.Migration):
    initial = True
    operations: ClassVar = [
        Migrate(),
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.BigIntegerField()),
                ("amount", models.DecimalField(decimal_places=2, max_digits=12)),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(condition=models.Q(("amount__gt", 0)), name="amount_is_positive")
                ],
            },
        ),
        migrations.CreateModel(
            name="Total",
            fields=[
                ("customer", models.BigIntegerField(primary_key=True, serialize=False)),
                ("amount", models.DecimalField(decimal_places=2, max_digits=12)),
            ],
        ),
    ]
